"""The routes of Anthropic's Messages API: a message, streamed or whole, and the count of a prompt's tokens.

Added to the HTTP API by `app.py`, which writes the errors of these routes in Anthropic's shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from modelswarm_gateway.api.fields.session_header import take_session_id
from modelswarm_gateway.api.forwarding import Forwarder, OriginalRequest
from modelswarm_gateway.api.http.generation_response import ResponseFormat
from modelswarm_gateway.api.http.json_body import BodyBudget, read_json
from modelswarm_gateway.api.http.openai_responses import ChatResponseBuilder
from modelswarm_gateway.api.http.relay import ForwardContext
from modelswarm_gateway.api.http.request_log import set_model
from modelswarm_gateway.api.messages.errors import MESSAGES_PATH
from modelswarm_gateway.api.messages.generated import MessagesResponse
from modelswarm_gateway.api.messages.headers import check_messages_headers
from modelswarm_gateway.api.messages.requests import parse_count_tokens, parse_messages
from modelswarm_gateway.generation.service import GenerationService


def add_messages_routes(
    app: FastAPI, service: GenerationService, forwarder: Forwarder, session_headers: Sequence[str]
) -> None:
    """Add the routes. `session_headers`: names of headers with a session's id, which is refused."""
    budget = BodyBudget()

    @app.post(MESSAGES_PATH)
    async def messages(request: Request, beta: str | None = None) -> Response:
        check_messages_headers(request.headers, beta)
        body = await read_json(request, budget)
        parsed = parse_messages(take_session_id(body, request.headers, session_headers))
        wanted = parsed.to_generation_request()
        # Without a session nothing is forwarded: the body is not kept.
        original = OriginalRequest(request.url.path, request.headers, {})
        return MessagesResponse(
            service,
            wanted,
            ChatResponseBuilder,  # of several answers, which no message has
            forward=ForwardContext(forwarder, original),
            response_format=ResponseFormat(
                stream=bool(parsed.stream), usage_in_stream=True, token_ids=False
            ),
        )

    @app.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(request: Request, beta: str | None = None) -> Response:
        check_messages_headers(request.headers, beta)
        wanted = parse_count_tokens(await read_json(request, budget)).to_generation_request()
        set_model(request.scope, wanted.model)
        count = await service.count_prompt(wanted)
        return JSONResponse({"input_tokens": count})
