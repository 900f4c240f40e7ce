"""Gives every HTTP request an id, a log line and a count, and every response the milliseconds until its first byte.

The client's `x-request-id` is used if it is valid. Any other one is replaced, because an id for tracing must not
fail a request. The response carries the id that the log line has.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelswarm_gateway.api.forwarding import FORWARDED_HEADER
from modelswarm_gateway.api.messages.errors import is_messages_path
from modelswarm_gateway.api.messages.headers import ANTHROPIC_VERSION
from modelswarm_gateway.errors import Code, shorten, status_of
from modelswarm_gateway.metrics.counters import OTHER_MODEL

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = b"request-id"  # which Anthropic's client reads
PROCESSING_MS = b"openai-processing-ms"
_NAME, _VERSION = REQUEST_ID.encode(), ANTHROPIC_VERSION.encode()
_FORWARDED = FORWARDED_HEADER.encode()
# Visible ASCII: it can neither break a log line nor look like two fields of one.
_VALID = re.compile(rb"[!-~]{1,128}")
# W3C Trace Context: version, trace id, id of the caller's span, flags. Any other value is ignored, as it requires.
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)
# Names of sessions and ids of responses: who knows one may use it, and logs are read by others than clients.
_NAMES = re.compile(r"(?<=^/v1/sessions/).+?(?=/fork$|$)|(?<=^/v1/responses/)[^/]+")
# Of requests that change nothing. They are neither logged nor counted: probes send several a second.
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class RequestLog:
    """Middleware that adds the id to request and response, and logs and counts the request when it has ended.

    The gateway that the client asked counts a forwarded request, with the status that the client got.

    While the gateway shuts down, every response closes its connection, so that clients with keep-alive connect to
    another gateway.
    """

    def __init__(
        self, app: ASGIApp, is_leaving: Callable[[], bool], on_ended: Callable[[str, int], None]
    ) -> None:
        """`on_ended` gets model and HTTP status of each request that ended."""
        self._app, self._is_leaving, self._on_ended = app, is_leaving, on_ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = assign_request_id(scope)
        state = {**scope.get("state", {}), "outcome": None, "model": OTHER_MODEL}
        scope = {**scope, "state": state}
        status: int | None = None
        started_at = time.monotonic()

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                close = [(b"connection", b"close")] if self._is_leaving() else []
                spent = f"{(time.monotonic() - started_at) * 1000:.0f}".encode()
                own = [(_NAME, request_id), (PROCESSING_MS, spent), *close]
                if is_messages_path(scope["path"]) or _names_version(scope):
                    own.append((ANTHROPIC_REQUEST_ID, request_id))
                message["headers"] = [*message["headers"], *own]
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        finally:
            if scope["method"] not in SAFE_METHODS:
                seconds = time.monotonic() - started_at
                outcome: Code | None = state["outcome"]
                ended = status if outcome is None else status_of(outcome)
                is_forwarded = any(name == _FORWARDED for name, _ in scope["headers"])
                if ended is not None and not is_forwarded:
                    self._on_ended(state["model"], ended)
                log.info(
                    "request %s%s: %s %s: %s %s after %.3f s",
                    *(request_id.decode(), _trace(scope), scope["method"]),
                    shorten(_raw_path(scope)),
                    *(status or "no response", outcome.value if outcome else "ok", seconds),
                )


def _names_version(scope: Scope) -> bool:
    """Return whether Anthropic's client sends the request, which may be for models."""
    return any(name == _VERSION for name, _ in scope["headers"])


def make_request_id() -> bytes:
    return f"req_{secrets.token_hex(12)}".encode()


def assign_request_id(scope: Scope) -> bytes:
    """Return the request's id: the client's if there is exactly one and it is valid, else a new one.

    It becomes the last header of `scope`, so that every later call returns the same.
    """
    given = [value for name, value in scope["headers"] if name == _NAME]
    is_valid = len(given) == 1 and _VALID.fullmatch(given[0])
    request_id: bytes = given[0] if is_valid else make_request_id()
    others = [header for header in scope["headers"] if header[0] != _NAME]
    scope["headers"] = [*others, (_NAME, request_id)]
    return request_id


def _trace(scope: Scope) -> str:
    """Return the id of the trace that the request belongs to, for its log line; "" without one."""
    given = [value for name, value in scope["headers"] if name == b"traceparent"]
    found = _TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    return f" (trace {found[1].decode()})" if found else ""


def set_outcome(scope: Scope, code: Code) -> None:
    """Record the error that a request ended with, for its log line and its counter."""
    scope["state"]["outcome"] = code


def set_model(scope: Scope, model: str) -> None:
    """Record the model that a request names, for its counter."""
    scope["state"]["model"] = model


def _raw_path(scope: Scope) -> str:
    """Return the path as it was sent, without names of sessions; the decoded one may contain line ends."""
    raw: bytes = scope.get("raw_path") or b"?"
    return _NAMES.sub("...", raw.decode("ascii", "replace"))
