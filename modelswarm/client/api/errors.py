"""Errors of the Python client: one class for each kind of answer that a gateway refuses a request with.

Raised by `Client` and `AsyncClient`. `str()` is one sentence; the fields say which request, field and status it was.

    ApiError
    ├── BadRequestError          400, 413, 415, 422, and input that is refused before it is sent
    │   └── ContextLengthError       the prompt does not fit into the context
    ├── AuthenticationError      401: of a proxy in front of the gateway
    ├── PermissionDeniedError    403: likewise
    ├── NotFoundError            404: no such model or session
    ├── ConflictError            409: the session runs a turn, or its name is in use
    ├── GoneError                410: the log of a session is lost, or another connection reads the stream
    ├── RateLimitError           429: no capacity now
    ├── ServiceUnavailableError  503: no server, or no gateway of the session, now
    ├── InternalServerError      any other status, and streams that could not be saved
    ├── ConnectionBrokenError    the connection could not be made, or broke off
    ├── NotAGatewayError         something else than a gateway answers
    └── ClosedClientError        the client was closed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelswarm.errors import ModelSwarmError, UnavailableError, UnreachableError, UserError

CONTEXT_LENGTH_CODE = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """Facts about a refusal; all are None if nothing was sent or nothing came back."""

    status: int | None = None  # of HTTP; None in the middle of a stream
    code: str | None = None  # stable name of the cause, as in docs/api.md
    param: str | None = None  # field of the request
    request_id: str | None = None  # as in the gateway's log
    retry_after: float | None = None  # seconds
    should_retry: bool | None = None  # by `x-should-retry`; None: the server does not say


class ApiError(ModelSwarmError):
    """Base of all errors that a client raises. `str()` is one sentence; `facts` has all that is known."""

    def __init__(self, message: str, facts: ErrorFacts | None = None) -> None:
        Exception.__init__(self, message)
        self.facts = facts or ErrorFacts()

    @property
    def status(self) -> int | None:
        """The status of HTTP; None in the middle of a stream, or if no answer came."""
        return self.facts.status

    @property
    def code(self) -> str | None:
        """The stable name of the cause, as in docs/api.md, such as no_capacity; None if no gateway named one."""
        return self.facts.code

    @property
    def param(self) -> str | None:
        """The field of the request that is wrong; None if no field is."""
        return self.facts.param

    @property
    def request_id(self) -> str | None:
        """The id by which the gateway's log names the request; None if no gateway answered."""
        return self.facts.request_id


class BadRequestError(ApiError, UserError):
    """The request is wrong: the same one fails again. `param` is the field."""

    def __init__(self, message: str, facts: ErrorFacts | None = None) -> None:
        self.field = (facts.param if facts else None) or "request"
        self.message = message.removeprefix(f"{self.field}: ")
        is_named = self.field == "request" or message.startswith(self.field)
        ApiError.__init__(self, message if is_named else f"{self.field}: {message}", facts)


class ContextLengthError(BadRequestError):
    """The prompt does not fit into the model's context, or into the session."""


class AuthenticationError(ApiError):
    """A proxy in front of the gateway needs another `api_key`."""


class PermissionDeniedError(ApiError):
    """A proxy in front of the gateway does not allow the request."""


class NotFoundError(ApiError):
    """The model or the session is not served here."""


class ConflictError(ApiError):
    """The session runs a turn, or a new session has a name in use."""


class GoneError(ApiError):
    """The log of the session is lost or differs, or another connection reads the stream now."""


class RateLimitError(ApiError, UnavailableError):
    """There is no capacity now; `retry_after` is the gateway's advice in seconds."""

    def __init__(self, message: str, facts: ErrorFacts | None = None) -> None:
        ApiError.__init__(self, message, facts)
        self.retry_after = self.facts.retry_after or 1.0


class ServiceUnavailableError(ApiError, UnavailableError):
    """No server or gateway can answer now; `retry_after` is the gateway's advice in seconds."""

    def __init__(self, message: str, facts: ErrorFacts | None = None) -> None:
        ApiError.__init__(self, message, facts)
        self.retry_after = self.facts.retry_after or 1.0


class InternalServerError(ApiError):
    """The gateway failed, or a stream could not be saved."""


class ConnectionBrokenError(ApiError, UnreachableError):
    """No gateway answers, or the connection broke and the answer could not be resumed. `address` is the URL."""

    def __init__(self, message: str, address: str, facts: ErrorFacts | None = None) -> None:
        ApiError.__init__(self, message, facts)
        self.address, self.api = address, "HTTP"


class GatewayUnreachableError(ConnectionBrokenError):
    """No connection could be made, so nothing was sent."""


class NotAGatewayError(ApiError, UnreachableError):
    """Something else than a gateway answers at the address."""

    def __init__(self, message: str, address: str, facts: ErrorFacts | None = None) -> None:
        ApiError.__init__(self, message, facts)
        self.address, self.api = address, "HTTP"


class ClosedClientError(ApiError):
    """The client was closed, or belongs to another event loop."""


_BY_STATUS: Mapping[int, type[ApiError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    413: BadRequestError,
    415: BadRequestError,
    422: BadRequestError,
    429: RateLimitError,
    503: ServiceUnavailableError,
}
_BY_CODE: Mapping[str, type[ApiError]] = {
    CONTEXT_LENGTH_CODE: ContextLengthError,
    "session_lost": GoneError,
    "append_unknown": GoneError,
    "stream_replaced": GoneError,
    "session_busy": ConflictError,
    "session_expired": NotFoundError,
    "no_capacity": RateLimitError,
    "no_servers": ServiceUnavailableError,
    "gateway_stopping": ServiceUnavailableError,
    "session_elsewhere": ServiceUnavailableError,
}


def error_of(message: str, facts: ErrorFacts) -> ApiError:
    """Return the error for a status and a code. An error in the middle of a stream has no status."""
    found = _BY_CODE.get(facts.code or "") or _BY_STATUS.get(facts.status or 0)
    return (found or InternalServerError)(message, facts)


def bad_request(param: str, message: str) -> BadRequestError:
    """Return the error for input that is not sent. `message` is the rest of the sentence behind the field."""
    return BadRequestError(f"{param}: {message}", ErrorFacts(param=param))
