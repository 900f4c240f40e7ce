"""Errors in Anthropic's shape. Used for every route below `/v1/messages`."""

from __future__ import annotations

import json

from starlette.responses import JSONResponse, Response

from modelswarm_gateway.errors import ApiError

MESSAGES_PATH = "/v1/messages"
# HTTP status -> Anthropic's name of the error.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_messages_path(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def error_body(error: ApiError) -> dict[str, object]:
    """Return Anthropic's body, with `code` and `param` as OpenAI's errors have them."""
    status = error.mapping.status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail = {
        "type": kind,
        "message": error.message,
        "param": error.param,
        "code": error.code.value,
    }
    return {"type": "error", "error": detail}


def messages_error_response(error: ApiError) -> Response:
    return JSONResponse(error_body(error), error.mapping.status, error.headers())


def messages_error_event(error: ApiError) -> bytes:
    return f"event: error\ndata: {json.dumps(error_body(error))}\n\n".encode()
