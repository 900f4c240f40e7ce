"""Errors of the gRPC client, and the translation of a failed call into one of them.

ModelSwarmError
├── RefusedError         the gateway refuses a field of the request; nothing was computed
├── SessionLengthError   more positions than the session has
├── SessionClosedError   a step of a session that was closed
├── SessionBusyError     a second thread, or a second step, in a session that runs one
├── SessionLostError     the session is gone, and cannot be built again
├── NoCapacityError      no free KV for it now
└── UnreachableError     nothing answers, or something that is no gateway
"""

from __future__ import annotations

from typing import Any

import grpc

from modelswarm.errors import ModelSwarmError, UnavailableError, UnreachableError, UserError


class RefusedError(UserError, ValueError):
    """The gateway refuses a field; `field` is its place in the request."""


class SessionLengthError(UserError, ValueError):
    """The input, or what shall be generated, does not fit into the session's max_length."""


class SessionClosedError(ModelSwarmError):
    """The session was closed."""


class SessionBusyError(ModelSwarmError):
    """The session runs a step, of this thread or another one."""


class SessionLostError(ModelSwarmError):
    """The servers hold the session no longer."""


class NoCapacityError(UnavailableError):
    """The servers have no free KV for the session or the request."""

    def of_rows(self, opened: int, wanted: int) -> NoCapacityError:
        """Return this error of one row as that of a batch of `wanted` rows."""
        return (
            self
            if wanted == 1
            else NoCapacityError(f"{opened} of {wanted} rows fit; {self}", self.retry_after)
        )


class ConnectionLostError(UnreachableError):
    """The call ended without an answer of the gateway, which may be gone."""


_LOST = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS)

# Codes of a gateway that goes away, and leaves its sessions to others.
_LEAVES = ("gateway_stopping", "session_elsewhere")


_REASONS = {
    "Connection refused": "nothing listens there",
    "WRONG_VERSION_NUMBER": "it has no TLS, so write http:// in place of https://",
    "wrong version number": "it has no TLS, so write http:// in place of https://",
    "CERTIFICATE_VERIFY_FAILED": "its TLS certificate is not trusted here",
    "certificate verify failed": "its TLS certificate is not trusted here",
    "frame type 80": "it speaks HTTP/1, as a gateway's HTTP port does",
    "DNS resolution failed": "the host has no address",
    "Domain name not found": "the host has no address",
}
"""Parts of gRPC's own text -> what they mean for the caller."""


def _find_reason(code: grpc.StatusCode, sentence: str) -> str:
    for part, reason in _REASONS.items():
        if part in sentence:
            return f": {reason}"
    return "" if code is grpc.StatusCode.UNAVAILABLE else f": the call ended with {code.name}"


def translate(error: grpc.RpcError, target: str) -> ModelSwarmError:
    """Return the typed error of a failed call of the gateway at `target`."""
    failed: Any = error
    code, sentence = failed.code(), failed.details() or "no reason was given"
    trailing = dict(failed.trailing_metadata() or ())
    known, field = trailing.get("error-code", ""), trailing.get("error-param", "request")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        detail = "allowed: the gateway's gRPC port, by default port 8001 (--grpc)"
        return UnreachableError(f"{target} has no Inference API; {detail}", target, "gRPC")
    if not known or known in _LEAVES:
        detail = "allowed: the gRPC port of a gateway, by default port 8001 (--grpc)"
        reason = _find_reason(code, sentence)
        message = f"no gateway answers gRPC at {target}{reason}; {detail}"
        return ConnectionLostError(message, target, "gRPC")
    wait = float(trailing.get("retry-after", 1.0))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if "again" not in sentence and "retry" not in sentence:
            sentence += f"; close other sessions, ask for fewer positions, or retry in {wait:g} s"
        return NoCapacityError(sentence, wait)
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(sentence, wait)
    if code is grpc.StatusCode.INVALID_ARGUMENT or known == "model_not_found":
        return RefusedError(field, sentence.removeprefix(f"{field}: "))
    if code in _LOST:
        return SessionLostError(sentence)
    if code is grpc.StatusCode.ABORTED:
        return SessionBusyError(sentence)
    return ModelSwarmError(sentence)
