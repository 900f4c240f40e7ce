"""`/v1/sessions`: opens a session with all its positions reserved, forks it, shows its state, and closes it.

A session that another gateway holds is forked, shown and closed there: the request is forwarded once. There is no list
of sessions on this port. Added to the app by `app.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse

from modelswarm_gateway.api.fields.request_model import RequestModel
from modelswarm_gateway.api.fields.session_header import (
    refuse_session_id,
    session_headers,
    take_session_id,
)
from modelswarm_gateway.api.fields.sessions import FORKS, SESSIONS
from modelswarm_gateway.api.forwarding import (
    FORWARDED_HEADER,
    Forwarder,
    PeerUnreachable,
    whole_answer,
)
from modelswarm_gateway.api.http.json_body import BodyBudget, read_json
from modelswarm_gateway.api.http.openai_requests import parse_body
from modelswarm_gateway.api.http.request_log import set_model
from modelswarm_gateway.core.interface.turn import Reservation
from modelswarm_gateway.errors import client_left, invalid_field
from modelswarm_gateway.generation.named_sessions import SessionKey
from modelswarm_gateway.generation.request import MAX_SESSION_ID_LENGTH
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_control import (
    close_session,
    fork_session,
    open_session,
    owner_not_reached,
    session_not_found,
    session_state,
)
from modelswarm_gateway.generation.session_locator import OwnedElsewhere
from modelswarm_gateway.settings import SESSION_HEADER

PATH = "/v1/sessions/{session_id:path}"
MAX_TTL = 86_400  # seconds
MAX_POSITIONS = (1 << 31) - 1  # more than any context has; a link carries no larger numbers
FORK_NAMES = "the path names the session, and session_id names the fork"


class SessionRequest(RequestModel):
    table = SESSIONS

    model: str = Field(min_length=1)
    session_id: str | None = Field(None, min_length=1, max_length=MAX_SESSION_ID_LENGTH)
    max_length: int = Field(ge=2, le=MAX_POSITIONS)
    ttl: int | None = Field(None, ge=1, le=MAX_TTL)


class ForkRequest(RequestModel):
    table = FORKS

    session_id: str | None = Field(None, min_length=1, max_length=MAX_SESSION_ID_LENGTH)
    position: int | None = Field(None, ge=1)


def add_session_routes(
    app: FastAPI,
    service: GenerationService,
    forwarder: Forwarder,
    header_names: Sequence[str] = (SESSION_HEADER,),
) -> None:
    """`header_names`: headers of a request that may have its session id, in the order of their precedence."""
    budget = BodyBudget()

    @app.post("/v1/sessions")
    async def open_(request: Request) -> Response:
        body = take_session_id(await read_json(request, budget), request.headers, header_names)
        wanted = parse_body(SessionRequest, body)
        key = _new_key(request, wanted.model, wanted.session_id)
        ttl = wanted.ttl or max(1, round(service.settings.idle_seconds))
        await open_session(service, key, Reservation(wanted.max_length, ttl))
        await _free_if_left(service, request, key)
        return await _state(key)

    @app.post(f"{PATH}/fork")
    async def fork(session_id: str, request: Request, model: str = "") -> Response:
        refuse_session_id(request.headers, header_names, FORK_NAMES)
        body = await read_json(request, budget)
        wanted, key = parse_body(ForkRequest, body), _key(service, request, session_id, model)
        new = _new_key(request, key[0], wanted.session_id)
        try:
            found = await fork_session(service, key, new, wanted.position)
        except OwnedElsewhere as elsewhere:
            return await _forward(forwarder, request, elsewhere, key, "/fork", body)
        if not found:
            raise session_not_found(key)
        await _free_if_left(service, request, new)
        return await _state(new)

    @app.api_route(PATH, methods=["GET", "HEAD"])
    async def show(session_id: str, request: Request, model: str = "") -> Response:
        key = _key(service, request, session_id, model)
        try:
            return await _state(key)
        except OwnedElsewhere as elsewhere:
            return await _forward(forwarder, request, elsewhere, key)

    @app.delete(PATH)
    async def close(session_id: str, request: Request, model: str = "") -> Response:
        key = _key(service, request, session_id, model)
        try:
            found = await close_session(service, key)
        except OwnedElsewhere as elsewhere:
            return await _forward(forwarder, request, elsewhere, key)
        if not found:
            raise session_not_found(key)
        return JSONResponse({"id": session_id, "object": "session", "deleted": True})

    async def _state(key: SessionKey) -> Response:
        found = await session_state(service, key)
        if found is None:
            raise session_not_found(key)
        response = JSONResponse(found.describe(key))
        response.raw_headers += session_headers(key[1])
        return response


async def _free_if_left(service: GenerationService, request: Request, key: SessionKey) -> None:
    """Free a session that was made just now if its client has left, and so cannot. Raise ApiError then."""
    if await request.is_disconnected():
        await close_session(service, key)
        raise client_left()


def _new_key(request: Request, model: str, session_id: str | None) -> SessionKey:
    """Return model and name of a session to open; it gets a name if it has none."""
    set_model(request.scope, model)
    return model, session_id or f"sess_{secrets.token_hex(12)}"


def _key(service: GenerationService, request: Request, session_id: str, model: str) -> SessionKey:
    """Return model and name of the session. The only model of a gateway need not be named."""
    names = [card.name for card in service.backend.model_cards()]
    if not model and len(names) == 1:
        model = names[0]
    if not model:
        raise invalid_field("model", "missing; name the session's model, ?model=NAME")
    set_model(request.scope, model)
    return model, session_id


async def _forward(
    forwarder: Forwarder,
    request: Request,
    elsewhere: OwnedElsewhere,
    key: SessionKey,
    action: str = "",
    body: object = None,
) -> Response:
    """Return the answer of the gateway that holds the session."""
    if FORWARDED_HEADER in request.headers or not elsewhere.http:
        raise owner_not_reached() from elsewhere
    path = f"/v1/sessions/{quote(key[1], safe='')}{action}"
    query, method = {"model": key[0]}, request.method
    try:
        answer = await forwarder.call(method, elsewhere.http, path, query, request.headers, body)
    except PeerUnreachable as error:
        raise owner_not_reached() from error
    return whole_answer(answer)
