"""`/v1/responses`: makes responses, shows and deletes stored ones, and lists their input.

A response that another gateway has stored is asked for there, if the session of its conversation tells where. Added to
the app by `http/app.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from modelswarm_gateway.api.fields.session_header import refuse_session_id
from modelswarm_gateway.api.forwarding import (
    FORWARDED_HEADER,
    Forwarder,
    OriginalRequest,
    PeerUnreachable,
    whole_answer,
)
from modelswarm_gateway.api.http.json_body import BodyBudget, read_json
from modelswarm_gateway.api.http.relay import ForwardContext
from modelswarm_gateway.api.responses.input_list import list_items, read_page
from modelswarm_gateway.api.responses.requests import parse_responses
from modelswarm_gateway.api.responses.response import ResponsesResponse
from modelswarm_gateway.api.responses.response_ids import (
    ResponseId,
    model_mark,
    parse_response_id,
)
from modelswarm_gateway.api.responses.stored_responses import StoredResponse, StoredResponses
from modelswarm_gateway.errors import ApiError, Code, shorten
from modelswarm_gateway.generation.named_sessions import SessionKey
from modelswarm_gateway.generation.resumption import LAST_EVENT_ID
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_control import check_elsewhere, close_session, kept_view
from modelswarm_gateway.generation.session_locator import OwnedElsewhere

PATH = "/v1/responses/{response_id}"
CONVERSATIONS = "previous_response_id names the conversation"
_READ_METHODS = ["GET", "HEAD"]


def add_response_routes(
    app: FastAPI, service: GenerationService, forwarder: Forwarder, session_headers: Sequence[str]
) -> None:
    """Add the routes. `session_headers`: names of headers with a session's id, which is refused."""
    budget, stored = BodyBudget(), StoredResponses(service.clock)
    shown = _StoredRoutes(service, forwarder, stored)

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        refuse_session_id(request.headers, session_headers, CONVERSATIONS)
        body = await read_json(request, budget)
        parsed = parse_responses(body)
        kept = parsed.body.obeyed_fields() | {"input": parsed.items}
        return ResponsesResponse(
            service,
            parsed,
            stored,
            forward=ForwardContext(
                forwarder, OriginalRequest(request.url.path, request.headers, kept)
            ),
            last_event_id=request.headers.get(LAST_EVENT_ID),
            forwarded=FORWARDED_HEADER in request.headers,
        )

    @app.api_route(PATH, methods=_READ_METHODS)
    async def show(response_id: str, request: Request) -> Response:
        found = await shown.find(response_id, request)
        return found if isinstance(found, Response) else JSONResponse(dict(found.body))

    @app.delete(PATH)
    async def delete(response_id: str, request: Request) -> Response:
        found = await shown.find(response_id, request)
        return found if isinstance(found, Response) else await shown.delete(found)

    @app.api_route(f"{PATH}/input_items", methods=_READ_METHODS)
    async def input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: str = "20",
        order: str = "desc",
    ) -> Response:
        page = read_page(after, limit, order)
        found = await shown.find(response_id, request)
        return found if isinstance(found, Response) else JSONResponse(list_items(found, page))


class _StoredRoutes:
    """Finds stored responses, here or at the gateway that holds the session."""

    def __init__(
        self, service: GenerationService, forwarder: Forwarder, stored: StoredResponses
    ) -> None:
        self._service, self._forwarder, self._stored = service, forwarder, stored

    async def find(self, name: str, request: Request) -> StoredResponse | Response:
        """Return the stored response, or the answer of the gateway that has it. Raise ApiError."""
        response_id = parse_response_id(name)
        found = None if response_id is None else self._stored.find(response_id)
        if found is not None:
            return found
        if response_id is not None and FORWARDED_HEADER not in request.headers:
            keys = self._keys(response_id)
            if not keys:
                self._service.check_discovery("response_id")
            try:
                for key in keys:
                    kept = kept_view(self._service, key)
                    if kept is None or not kept.is_reachable:
                        await check_elsewhere(self._service, key)
            except OwnedElsewhere as elsewhere:
                return await self._forward(request, elsewhere)
        detail = (
            f"response_id: no response {shorten(name)!r} is stored; responses are kept for an hour"
        )
        raise ApiError(Code.NOT_FOUND, detail, param="response_id")

    async def delete(self, found: StoredResponse) -> Response:
        """Close the session of its conversation if the response is the last one there, and forget the response.

        An ApiError leaves both: the client may ask again.
        """
        for key in self._keys(found.id) if self._stored.is_last(found.id) else ():
            if not self._service.named_sessions.is_busy(key):
                try:
                    await close_session(self._service, key)
                except OwnedElsewhere:
                    continue  # that gateway has gone on with it
        self._stored.remove(found.id)
        return JSONResponse({"id": str(found.id), "object": "response", "deleted": True})

    def _keys(self, response_id: ResponseId) -> list[SessionKey]:
        """Return the session, under each model that the id may name."""
        names = [card.name for card in self._service.backend.model_cards()]
        return [(n, response_id.session_id) for n in names if model_mark(n) == response_id.model]

    async def _forward(self, request: Request, elsewhere: OwnedElsewhere) -> Response:
        path, query = request.url.path, dict(request.query_params)
        try:
            answer = await self._forwarder.call(
                request.method, elsewhere.http, path, query, request.headers
            )
        except PeerUnreachable as error:
            detail = "the gateway that has stored this response cannot be reached"
            raise ApiError(
                Code.SESSION_ELSEWHERE, detail, param="response_id", retry_after=1.0
            ) from error
        return whole_answer(answer)
