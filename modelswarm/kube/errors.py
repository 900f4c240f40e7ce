"""Errors of requests to a Kubernetes API server, one class for each way to react to them.

Raised by `client`, handled by the gateway's reflector and the operator's executor and workers. Knows no HTTP library.

    KubeError                    any other refusal: the caller repeats the whole job with a back-off
    ├── NotFoundError                404: the object does not exist
    ├── ConflictError                409: the object was changed meanwhile, or its name is taken: read it again
    ├── ThrottledError               429: retry after `retry_after` seconds
    ├── KubeUnavailableError         410, 5xx: a write may or may not have happened
    │   └── UnreachableError             no answer, a part of one, or no address of an API server
    ├── UnauthorizedError            401: the credentials are not valid any more
    └── RejectedError                400, 403, 422, and 500 of a webhook that fails: a person must read the message
"""

from __future__ import annotations

from typing import Any

from modelswarm.errors import ModelSwarmError

DEFAULT_RETRY_SECONDS = 1.0  # after a 429 that names no time
_WEBHOOK_FAILED = "failed calling webhook"  # in the message if an admission webhook did not answer


class KubeError(ModelSwarmError):
    """`code` is the HTTP status, 0 without an answer; `reason` is Kubernetes' word (AlreadyExists, Conflict, ...).

    `retry_after` is the pause in seconds that the API server asks for, 0 if it asks for none.
    """

    def __init__(self, code: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retry_after = retry_after


class NotFoundError(KubeError):
    pass


class ConflictError(KubeError):
    @property
    def already_exists(self) -> bool:
        return self.reason == "AlreadyExists"


class ThrottledError(KubeError):
    pass


class KubeUnavailableError(KubeError):
    retryable = True


class UnreachableError(KubeUnavailableError):
    def __init__(self, message: str) -> None:
        super().__init__(0, "", message)


class UnauthorizedError(KubeError):
    pass


class RejectedError(KubeError):
    pass


_BY_CODE: dict[int, type[KubeError]] = {
    400: RejectedError,
    401: UnauthorizedError,
    403: RejectedError,
    404: NotFoundError,
    409: ConflictError,
    410: KubeUnavailableError,  # the version of a list or watch is not kept any more: start again
    422: RejectedError,
    429: ThrottledError,
}


def error_of(code: int, status: Any, retry_after: str | None) -> KubeError:
    """Return the error of an answer: its HTTP status, its body (a v1 Status if the API server wrote it) and the
    header Retry-After."""
    status = status if isinstance(status, dict) else {}
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or f"the API server answered {code}")
    kind = _BY_CODE.get(code, KubeUnavailableError if code >= 500 else KubeError)
    if code == 500 and _WEBHOOK_FAILED in message:  # before anything was stored
        kind = RejectedError
    return kind(code, reason, message, _retry_seconds(code, retry_after, status))


def _retry_seconds(code: int, header: str | None, status: dict[str, Any]) -> float:
    """A date is allowed in the header too, but no API server sends one."""
    details = status.get("details")
    body = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    text = str(header if header is not None else body)
    if text.isdecimal():
        return float(text)
    return DEFAULT_RETRY_SECONDS if code == 429 else 0.0
