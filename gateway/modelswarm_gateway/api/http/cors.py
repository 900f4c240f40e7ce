"""Cross-origin requests (CORS) from browsers, for the origins that `--cors-origin` allows; off without one.

Wraps the HTTP API. Credentials are never allowed: the API knows no cookies, and an `authorization` header that a script
sets needs none. A browser asks before it sends JSON, but sends text of any page at once; `OriginCheck` refuses that.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelswarm_gateway.api.http.generation_response import error_response
from modelswarm_gateway.api.http.request_log import SAFE_METHODS
from modelswarm_gateway.errors import ApiError, Code, shorten

ANY_ORIGIN = "*"
METHODS = "DELETE, GET, HEAD, POST"
# Response headers that a script may read.
EXPOSED_HEADERS = (
    "x-request-id, x-session-id, retry-after, retry-after-ms, x-should-retry, openai-processing-ms"
)
# Seconds that a browser may keep the answer to a preflight; Chrome keeps none for longer.
MAX_AGE = 7200
_JSON = "application/json"


class OriginCheck:
    """Refuses requests that a page of another origin sends without a question that CORS could answer with no."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = origins

    async def __call__(self, request: Request) -> None:
        """Raise ApiError for such a request."""
        origin = request.headers.get("origin")
        if origin is None or request.method in SAFE_METHODS or _is_allowed(origin, self._origins):
            return
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != _JSON:
            detail = f"a web page of {shorten(origin)!r} must send {_JSON}, not {shorten(kind)!r}"
        elif _leads_here(request, origin):
            detail = f"{shorten(origin)!r} is this gateway under another name, and it has no pages"
        else:
            return
        detail = f"Origin: {detail}; or allow its origin with the gateway's --cors-origin"
        raise ApiError(Code.INVALID_REQUEST, detail, param="Origin")


def _leads_here(request: Request, origin: str) -> bool:
    """Return whether the page has the gateway's own port, so that a browser takes both for one (DNS rebinding)."""
    host = request.headers.get("host", "")
    port = host.rpartition(":")[2] if ":" in host.rpartition("]")[2] else "80"
    server = request.scope.get("server")
    return origin == f"http://{host}" and server is not None and port == str(server[1])


def _is_allowed(origin: str, origins: Sequence[str]) -> bool:
    return ANY_ORIGIN in origins or origin in origins


class CorsMiddleware:
    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Headers(scope=scope)
        is_preflight = (
            scope["method"] == "OPTIONS" and "access-control-request-method" in request
        ) and "origin" in request
        response = self._answer_preflight(request) if is_preflight else self._app

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add_headers(MutableHeaders(scope=message), request.get("origin"))
            await send(message)

        await response(scope, receive, send_with_origin)

    def _add_headers(self, response: MutableHeaders, origin: str | None) -> None:
        if ANY_ORIGIN not in self._origins:
            response.add_vary_header("Origin")  # caches must not mix the answers of two origins
        if origin is not None and _is_allowed(origin, self._origins):
            is_any = ANY_ORIGIN in self._origins
            response["access-control-allow-origin"] = ANY_ORIGIN if is_any else origin
            response["access-control-expose-headers"] = EXPOSED_HEADERS

    def _answer_preflight(self, request: Headers) -> Response:
        """Return the answer to a browser that asks before it sends a request. All request headers are allowed."""
        origin = request["origin"]
        if not _is_allowed(origin, self._origins):
            allowed = ", ".join(self._origins)
            detail = f"the origin {shorten(origin)!r} is not allowed; allowed: {allowed}"
            return error_response(ApiError(Code.INVALID_REQUEST, detail))
        headers = {
            "access-control-allow-methods": METHODS,
            "access-control-max-age": str(MAX_AGE),
            "vary": "Access-Control-Request-Headers",
        }
        if wanted := request.get("access-control-request-headers"):
            headers["access-control-allow-headers"] = wanted
        return Response(status_code=204, headers=headers)
