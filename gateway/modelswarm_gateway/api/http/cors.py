"""Cross-origin requests (CORS) from browsers, for the origins that `--cors-origin` allows; off without one.

Wraps the HTTP API. Credentials are never allowed: the API knows no cookies, and an `authorization` header that a script
sets needs none.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelswarm_gateway.api.http.generation_response import error_response
from modelswarm_gateway.errors import ApiError, Code, shorten

ANY_ORIGIN = "*"
METHODS = "DELETE, GET, HEAD, POST"
# Response headers that a script may read.
EXPOSED_HEADERS = (
    "x-request-id, x-session-id, retry-after, retry-after-ms, x-should-retry, openai-processing-ms"
)
# Seconds that a browser may keep the answer to a preflight; Chrome keeps none for longer.
MAX_AGE = 7200


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

    def _is_allowed(self, origin: str) -> bool:
        return ANY_ORIGIN in self._origins or origin in self._origins

    def _add_headers(self, response: MutableHeaders, origin: str | None) -> None:
        if ANY_ORIGIN not in self._origins:
            response.add_vary_header("Origin")  # caches must not mix the answers of two origins
        if origin is not None and self._is_allowed(origin):
            is_any = ANY_ORIGIN in self._origins
            response["access-control-allow-origin"] = ANY_ORIGIN if is_any else origin
            response["access-control-expose-headers"] = EXPOSED_HEADERS

    def _answer_preflight(self, request: Headers) -> Response:
        """Return the answer to a browser that asks before it sends a request. All request headers are allowed."""
        origin = request["origin"]
        if not self._is_allowed(origin):
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
