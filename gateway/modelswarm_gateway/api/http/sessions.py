"""`DELETE /v1/sessions/{session_id}?model=MODEL`: closes a named session that its client no longer needs.

A session that another gateway holds is closed there: the request is forwarded once. Added to the app by `app.py`.
"""

from __future__ import annotations

from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from modelswarm_gateway.api.forwarding import FORWARDED_HEADER, Forwarder, PeerUnreachable
from modelswarm_gateway.errors import ApiError, Code, invalid_request
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_closing import close_session
from modelswarm_gateway.generation.session_locator import OwnedElsewhere


def add_session_routes(app: FastAPI, service: GenerationService, forwarder: Forwarder) -> None:
    @app.delete("/v1/sessions/{session_id:path}")
    async def close(session_id: str, request: Request, model: str = "") -> Response:
        if not model:
            raise invalid_request("model", "model: missing; name the session's model, ?model=NAME")
        try:
            found = await close_session(service, model, session_id)
        except OwnedElsewhere as elsewhere:
            if FORWARDED_HEADER in request.headers or not elsewhere.http:
                raise _not_reached() from elsewhere
            return await _forward(forwarder, request, elsewhere.http, model, session_id)
        if not found:
            detail = f"no gateway holds a session {session_id[:80]!r} of {model!r}"
            raise ApiError(Code.NOT_FOUND, detail, param="session_id")
        return JSONResponse({"id": session_id, "object": "session", "deleted": True})


async def _forward(
    forwarder: Forwarder, request: Request, target: str, model: str, session_id: str
) -> Response:
    """Return the answer of the gateway at `target`."""
    path = f"/v1/sessions/{quote(session_id, safe='')}"
    try:
        answer = await forwarder.delete(target, path, {"model": model}, request.headers)
    except PeerUnreachable as error:
        raise _not_reached() from error
    return Response(answer.content, answer.status_code, media_type="application/json")


def _not_reached() -> ApiError:
    detail = (
        "the gateway that holds this session cannot be reached; it drops idle sessions by itself"
    )
    return ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)
