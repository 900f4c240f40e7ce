"""What the API server can answer with, by what the operator does about it.

Made by `client` from an answer (or from its absence), sorted out by `apply` and `tasks`. Knows no HTTP library.

    ApiError                 whatever else it said: the turn fails and is repeated with backoff
    ├── NotFoundError            the object is gone
    ├── ConflictError            somebody wrote first, or an object of that name is there: read again
    ├── ThrottledError           429: not before `retry_after`
    ├── UnavailableError         5xx, no answer, half an answer: whether it happened is not known
    ├── UnauthorizedError        401: the credentials ran out
    └── RejectedError            400, 403, 422: the same request fails again; a person reads the message
"""

from __future__ import annotations

from typing import Any

from modelswarm.errors import ModelSwarmError


class LeaseLostError(ModelSwarmError):
    """A write was stopped because this process may no longer be the leader."""


class ApiError(ModelSwarmError):
    """`reason` is Kubernetes' own word (AlreadyExists, Conflict, ...); `str()` is its sentence."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class NotFoundError(ApiError):
    pass


class ConflictError(ApiError):
    @property
    def exists(self) -> bool:
        return self.reason == "AlreadyExists"


class ThrottledError(ApiError):
    def __init__(self, code: int, reason: str, message: str, retry_after: float) -> None:
        super().__init__(code, reason, message)
        self.retry_after = retry_after


class UnavailableError(ApiError):
    retryable = True


class UnauthorizedError(ApiError):
    pass


class RejectedError(ApiError):
    pass


_BY_CODE: dict[int, type[ApiError]] = {
    400: RejectedError,
    401: UnauthorizedError,
    403: RejectedError,
    404: NotFoundError,
    409: ConflictError,
    410: UnavailableError,  # a list that was continued too late: start again
    422: RejectedError,
}


def error_of(code: int, status: Any, retry_after: str | None) -> ApiError:
    """From the answer's code, its body (a v1 Status if the API server wrote it) and its Retry-After."""
    status = status if isinstance(status, dict) else {}
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or f"the API server answered {code}")
    if code == 429:
        return ThrottledError(code, reason, message, _seconds(retry_after, status))
    if code >= 500:
        return UnavailableError(code, reason, message)
    return _BY_CODE.get(code, ApiError)(code, reason, message)


def _seconds(header: str | None, status: dict[str, Any]) -> float:
    details = status.get("details")
    body = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    text = str(header if header is not None else body)
    return (
        float(text) if text.isdecimal() else 1.0
    )  # a date is allowed there, but no API server sends one
