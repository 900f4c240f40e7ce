"""Errors for clients of the gateway, and the one table that maps them to HTTP and gRPC.

Raised by the APIs (bad requests), the service (unknown model, prompt too long) and the node (no room, no server,
broken stream). Does not know how an API writes them.
"""

from __future__ import annotations

import enum
import math
import random
import re
from dataclasses import dataclass

import grpc

from modelswarm_gateway.core.interface.effects import Refused
from modelswarm_gateway.core.interface.errors import CoreError, PromptTooLong, SessionBusy
from modelswarm_gateway.core.interface.turn import RefusalReason

# A peer's identity: name, incarnation and boot nonce.
_IDENTITY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/[0-9]+/[0-9A-Za-z]+")
# Characters of a client's text that an error message repeats.
MAX_QUOTED = 64
# Seconds by which a time to wait is longer for some clients.
RETRY_SPREAD = 0.25


class Code(enum.Enum):
    """Stable names of failures: `error.code` over HTTP, `error-code` metadata over gRPC."""

    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED = "unsupported_parameter"
    UNKNOWN_PARAMETER = "unknown_parameter"
    CONTEXT_LENGTH = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    RESPONSE_NOT_FOUND = "previous_response_not_found"
    SERVER_NOT_FOUND = "server_not_found"
    BLOCKS_UNCOVERED = "blocks_uncovered"
    DRAIN_UNDONE = "drain_undone"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_LARGE = "request_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    SESSION_BUSY = "session_busy"
    SESSION_ELSEWHERE = "session_elsewhere"
    SESSION_LOST = "session_lost"
    SESSION_EXISTS = "session_exists"
    SESSION_EXPIRED = "session_expired"
    APPEND_UNKNOWN = "append_unknown"
    STREAM_REPLACED = "stream_replaced"
    STREAM_UNREAD = "stream_unread"
    NO_CAPACITY = "no_capacity"
    NO_SERVERS = "no_servers"
    STOPPING = "gateway_stopping"
    CANCELLED = "cancelled"
    STREAM_BROKEN = "stream_broken"
    INTERNAL = "internal_error"


# Ends of a turn at the request of a client: nothing failed.
CLIENT_ENDED = (Code.CANCELLED, Code.STREAM_REPLACED, Code.STREAM_UNREAD)


def parse_code(name: str) -> Code:
    """Parse the code of another gateway, which may be newer; an unknown code becomes INTERNAL."""
    return Code(name) if name in {code.value for code in Code} else Code.INTERNAL


@dataclass(frozen=True, slots=True)
class ErrorMapping:
    status: int  # HTTP
    grpc: grpc.StatusCode
    type: str  # `error.type`, as OpenAI names it
    retryable: bool  # the same request may succeed later


_USER, _SERVER = "invalid_request_error", "server_error"
_BUSY = "rate_limit_error"

TABLE: dict[Code, ErrorMapping] = {
    Code.INVALID_REQUEST: ErrorMapping(400, grpc.StatusCode.INVALID_ARGUMENT, _USER, False),
    Code.UNSUPPORTED: ErrorMapping(400, grpc.StatusCode.INVALID_ARGUMENT, _USER, False),
    Code.UNKNOWN_PARAMETER: ErrorMapping(400, grpc.StatusCode.INVALID_ARGUMENT, _USER, False),
    Code.CONTEXT_LENGTH: ErrorMapping(400, grpc.StatusCode.INVALID_ARGUMENT, _USER, False),
    Code.MODEL_NOT_FOUND: ErrorMapping(404, grpc.StatusCode.NOT_FOUND, _USER, False),
    Code.NOT_FOUND: ErrorMapping(404, grpc.StatusCode.NOT_FOUND, _USER, False),
    Code.RESPONSE_NOT_FOUND: ErrorMapping(404, grpc.StatusCode.NOT_FOUND, _USER, False),
    Code.SERVER_NOT_FOUND: ErrorMapping(404, grpc.StatusCode.NOT_FOUND, _USER, False),
    Code.BLOCKS_UNCOVERED: ErrorMapping(409, grpc.StatusCode.FAILED_PRECONDITION, _SERVER, True),
    Code.DRAIN_UNDONE: ErrorMapping(409, grpc.StatusCode.FAILED_PRECONDITION, _USER, False),
    Code.METHOD_NOT_ALLOWED: ErrorMapping(405, grpc.StatusCode.UNIMPLEMENTED, _USER, False),
    Code.TOO_LARGE: ErrorMapping(413, grpc.StatusCode.INVALID_ARGUMENT, _USER, False),
    Code.UNSUPPORTED_MEDIA_TYPE: ErrorMapping(415, grpc.StatusCode.INVALID_ARGUMENT, _USER, False),
    Code.SESSION_BUSY: ErrorMapping(409, grpc.StatusCode.ABORTED, _USER, True),
    Code.SESSION_ELSEWHERE: ErrorMapping(503, grpc.StatusCode.UNAVAILABLE, _SERVER, True),
    Code.SESSION_LOST: ErrorMapping(410, grpc.StatusCode.DATA_LOSS, _USER, False),
    Code.SESSION_EXISTS: ErrorMapping(409, grpc.StatusCode.ALREADY_EXISTS, _USER, False),
    Code.SESSION_EXPIRED: ErrorMapping(404, grpc.StatusCode.NOT_FOUND, _USER, False),
    Code.APPEND_UNKNOWN: ErrorMapping(410, grpc.StatusCode.ABORTED, _USER, False),
    Code.STREAM_REPLACED: ErrorMapping(410, grpc.StatusCode.FAILED_PRECONDITION, _USER, False),
    Code.STREAM_UNREAD: ErrorMapping(408, grpc.StatusCode.FAILED_PRECONDITION, _USER, False),
    Code.NO_CAPACITY: ErrorMapping(429, grpc.StatusCode.RESOURCE_EXHAUSTED, _BUSY, True),
    Code.NO_SERVERS: ErrorMapping(503, grpc.StatusCode.UNAVAILABLE, _SERVER, True),
    Code.STOPPING: ErrorMapping(503, grpc.StatusCode.UNAVAILABLE, _SERVER, True),
    Code.CANCELLED: ErrorMapping(499, grpc.StatusCode.CANCELLED, _USER, False),
    Code.STREAM_BROKEN: ErrorMapping(500, grpc.StatusCode.INTERNAL, _SERVER, True),
    Code.INTERNAL: ErrorMapping(500, grpc.StatusCode.INTERNAL, _SERVER, True),
}


def status_of(code: Code | None) -> int:
    """Return the HTTP status of a request that ended with this code; None: it succeeded."""
    return 200 if code is None else TABLE[code].status


class ApiError(Exception):
    """A refusal or failure that is reported to a client; `str()` is the sentence it reads."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        repeats: bool = False,
    ) -> None:
        """`repeats`: this request would fail again, though others with this code may succeed later."""
        message = _whole_characters(message)
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = None if param is None else _whole_characters(param)
        self.retry_after = retry_after  # seconds
        self.is_retryable = self.mapping.retryable and not repeats

    @property
    def mapping(self) -> ErrorMapping:
        return TABLE[self.code]

    def envelope(self) -> dict[str, object]:
        """Return the error body that OpenAI clients understand."""
        error = {
            "message": self.message,
            "type": self.mapping.type,
            "param": self.param,
            "code": self.code.value,
        }
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Return `x-should-retry`, which OpenAI's clients obey, and `retry-after` in seconds and in milliseconds.

        Their clients wait for exactly the latter, so it is spread: those refused together would come back together.
        """
        should_retry = {"x-should-retry": "true" if self.is_retryable else "false"}
        if self.retry_after is None:
            return should_retry
        wait = self.retry_after + random.uniform(0.0, RETRY_SPREAD)
        return should_retry | {
            "retry-after": str(max(1, math.ceil(self.retry_after))),
            "retry-after-ms": str(max(1, round(1000 * wait))),
        }


def _whole_characters(text: str) -> str:
    """Return a text that can be sent: a client's may have halves of surrogate pairs, which are shown by their codes."""
    return text.encode(errors="backslashreplace").decode()


def invalid_request(param: str | None, message: str) -> ApiError:
    return ApiError(Code.INVALID_REQUEST, message, param=param)


def invalid_field(field: str, detail: str) -> ApiError:
    """Return the refusal of one field of a request, with its name before the detail."""
    return invalid_request(field, f"{field}: {detail}")


def shorten(text: str) -> str:
    """Return a client's text for an error message: its start, if it is long."""
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


def hide_identities(text: str) -> str:
    """Return the text with servers' names in place of their identities, which no client needs."""
    return _IDENTITY.sub(r"\1", text)


def model_not_found(name: str) -> ApiError:
    detail = f"the model {shorten(name)!r} does not exist here"
    return ApiError(Code.MODEL_NOT_FOUND, detail, param="model")


def session_taken_over() -> ApiError:
    detail = "another gateway has taken this session over; resume there with Last-Event-ID"
    return ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)


def stream_replaced() -> ApiError:
    detail = "another connection has resumed this stream; its text continues there"
    return ApiError(Code.STREAM_REPLACED, detail, param="session_id")


def stream_unread(seconds: float) -> ApiError:
    detail = (
        f"the client took nothing of the answer for {seconds:g} s; a stream with a session_id can be resumed "
        "with Last-Event-ID"
    )
    return ApiError(Code.STREAM_UNREAD, detail)


def client_left() -> ApiError:
    return ApiError(Code.CANCELLED, "the client left")


def gateway_stopping() -> ApiError:
    return ApiError(Code.STOPPING, "this gateway is stopping; retry in 1 s", retry_after=1.0)


_REFUSALS = {
    RefusalReason.NO_ROOM: Code.NO_CAPACITY,
    RefusalReason.NO_SERVERS: Code.NO_SERVERS,
    RefusalReason.TOO_LONG: Code.CONTEXT_LENGTH,
    RefusalReason.FAULTS: Code.NO_SERVERS,
}


def from_refusal(refused: Refused) -> ApiError:
    code = _REFUSALS[refused.reason]
    retry = refused.retry_after if TABLE[code].retryable else None
    param = "max_tokens" if code is Code.CONTEXT_LENGTH else None
    return ApiError(code, hide_identities(refused.detail), param=param, retry_after=retry)


def from_core(error: CoreError, param: str) -> ApiError:
    """Return the ApiError for an error of the core. `param`: the request field that carried the prompt."""
    if isinstance(error, PromptTooLong):
        return ApiError(Code.CONTEXT_LENGTH, str(error), param=param)
    if isinstance(error, SessionBusy):
        return ApiError(Code.SESSION_BUSY, str(error), param="session_id", retry_after=1.0)
    return ApiError(Code.INTERNAL, str(error))
