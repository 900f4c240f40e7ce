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


class ConnectionLostError(UnreachableError):
    """The call ended without an answer of the gateway, which may be gone."""


_LOST = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS)

# Codes of a gateway that goes away, and leaves its sessions to others.
_LEAVES = ("gateway_stopping", "session_elsewhere")


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
        message = f"no gateway answers at {target} ({code.name}: {sentence}); {detail}"
        return ConnectionLostError(message, target, "gRPC")
    wait = float(trailing.get("retry-after", 1.0))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
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
