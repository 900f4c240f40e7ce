"""The HTTP API: OpenAI's routes, health and readiness.

`app.py` of the gateway serves the app that this builds. Every failure has OpenAI's error envelope, every response an
`x-request-id`. Knows the service; neither sessions nor servers.

`GET /` is 404, as vLLM's: a client that asks `/` for the kind of server must not take this one for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from modelswarm import __version__
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.messages import PROTOCOL_VERSION
from modelswarm_gateway.api.fields.headers import check_headers
from modelswarm_gateway.api.fields.query import check_query
from modelswarm_gateway.api.fields.session_header import take_session_id
from modelswarm_gateway.api.forwarding import FORWARDED_HEADER, Forwarder, OriginalRequest
from modelswarm_gateway.api.http.cors import CorsMiddleware, OriginCheck
from modelswarm_gateway.api.http.generation_response import (
    GenerationResponse,
    ResponseFormat,
    error_response,
)
from modelswarm_gateway.api.http.json_body import BodyBudget, read_json
from modelswarm_gateway.api.http.openai_requests import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from modelswarm_gateway.api.http.openai_responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
)
from modelswarm_gateway.api.http.relay import ForwardContext
from modelswarm_gateway.api.http.request_log import RequestLog, set_outcome
from modelswarm_gateway.api.http.sessions import add_session_routes
from modelswarm_gateway.api.messages.errors import is_messages_path, messages_error_response
from modelswarm_gateway.api.messages.headers import ANTHROPIC_VERSION, wants_messages_shape
from modelswarm_gateway.api.messages.models import model_info, model_page
from modelswarm_gateway.api.messages.routes import add_messages_routes
from modelswarm_gateway.api.openapi.document import add_openapi_route
from modelswarm_gateway.api.responses.routes import add_response_routes
from modelswarm_gateway.api.tokenization import add_tokenization_routes
from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.backend.protocol import SessionBackend
from modelswarm_gateway.errors import ApiError, Code, invalid_request, shorten
from modelswarm_gateway.generation.request import GenerationRequest, check_answers
from modelswarm_gateway.generation.resumption import LAST_EVENT_ID, parse_event_id
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.settings import SESSION_HEADER

READ_METHODS = ["GET", "HEAD"]
ROUTES = (
    "POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, GET /v1/responses/{id}, "
    "DELETE /v1/responses/{id}, GET /v1/responses/{id}/input_items, POST /v1/messages, "
    "POST /v1/messages/count_tokens, POST /tokenize, POST /detokenize, POST /v1/sessions/{id}/fork, "
    "POST /v1/sessions, GET /v1/sessions/{id}, DELETE /v1/sessions/{id}, GET /v1/models, GET /v1/models/{id}, "
    "GET /health, GET /live, GET /ready, GET /version, GET /openapi.json"
)


def build_http_app(
    service: GenerationService,
    unready: Callable[[], str | None] | None = None,
    cors_origins: Sequence[str] = (),
    ports: Mapping[str, int] | None = None,
    forwarder: Forwarder | None = None,
    session_header_names: Sequence[str] = (SESSION_HEADER,),
) -> ASGIApp:
    """Return the app. `unready` returns why the gateway is not ready; by default it is ready once a model is.

    `ports` are announced to clients, as `grpc_port` and the like. `forwarder` is closed by the caller.
    `session_header_names`: headers of a request that may have its session id, in the order of their precedence.
    """
    checks = [Depends(OriginCheck(cors_origins)), Depends(check_query), Depends(check_headers)]
    app = FastAPI(title="ModelSwarm gateway", openapi_url=None, dependencies=checks)
    forwarder = forwarder or Forwarder()
    _generation_routes(app, service, forwarder, session_header_names)
    add_response_routes(app, service, forwarder, session_header_names)
    add_messages_routes(app, service, forwarder, session_header_names)
    add_tokenization_routes(app, service)
    _model_routes(app, service)
    add_session_routes(app, service, forwarder, session_header_names)
    _state_routes(app, service, unready or (lambda: _unready_reason(service.backend)))
    _version_route(app, ports or {})
    add_openapi_route(app)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    served = CorsMiddleware(app, cors_origins) if cors_origins else app
    return RequestLog(served, lambda: service.shutting_down, service.metrics.count_request)


def _generation_routes(
    app: FastAPI, service: GenerationService, forwarder: Forwarder, header_names: Sequence[str]
) -> None:
    budget = BodyBudget()

    async def respond(
        request: Request,
        parse: Callable[[object], ChatRequest | CompletionRequest],
        builder: type[ResponseBuilder],
    ) -> Response:
        body = await read_json(request, budget)
        body = take_session_id(body, request.headers, header_names)
        parsed = parse(body)
        first, *others = parsed.to_generation_requests()
        check_answers(first.options, (1 + len(others)) * parsed.answer_count())
        first = _apply_headers(request, first, bool(parsed.stream))
        # Only a session may be at another gateway. Fields without an effect may be large: they are not kept.
        kept = {} if first.session_id is None else parsed.obeyed_fields()
        original = OriginalRequest(request.url.path, request.headers, kept)
        usage_in_stream, usage_in_events = parsed.stream_usage()
        return GenerationResponse(
            service,
            first,
            builder,
            others=others,
            forward=ForwardContext(forwarder, original),
            response_format=ResponseFormat(
                stream=bool(parsed.stream),
                usage_in_stream=usage_in_stream,
                token_ids=bool(parsed.return_token_ids),
                n=parsed.answer_count(),
                usage_in_events=usage_in_events,
                names_as_ids=bool(parsed.return_tokens_as_token_ids),
                prompt_logprobs=parsed.prompt_logprobs,
            ),
        )

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await respond(request, parse_chat, ChatResponseBuilder)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await respond(request, parse_completion, CompletionResponseBuilder)


def _apply_headers(
    request: Request, generation_request: GenerationRequest, stream: bool
) -> GenerationRequest:
    """Return the request with its headers applied: the event to resume after, and the mark of a forwarded request."""
    last_event_id = request.headers.get(LAST_EVENT_ID)
    if last_event_id is not None:
        if generation_request.session_id is None or not stream:
            raise invalid_request(
                LAST_EVENT_ID, f"{LAST_EVENT_ID}: only a stream with a session_id can be resumed"
            )
        after, mark = parse_event_id(last_event_id)
        generation_request = replace(generation_request, resume_after=after, resume_mark=mark)
    return replace(generation_request, forwarded=FORWARDED_HEADER in request.headers)


def _model_routes(app: FastAPI, service: GenerationService) -> None:
    @app.api_route("/v1/models", methods=READ_METHODS)
    async def models(request: Request, beta: str | None = None) -> Response:
        if wants_messages_shape(request.headers, beta):
            return JSONResponse(model_page(service.backend.model_cards()))
        data = [_model_entry(card) for card in service.backend.model_cards()]
        return JSONResponse({"object": "list", "data": data})

    @app.api_route("/v1/models/{name:path}", methods=READ_METHODS)
    async def model(request: Request, name: str, beta: str | None = None) -> Response:
        if not name:  # /v1/models/
            return await models(request, beta)
        as_message_api = wants_messages_shape(request.headers, beta)
        card = service.find_card(name)
        return JSONResponse(model_info(card) if as_message_api else _model_entry(card))


def _model_entry(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.known_since,
        "owned_by": "modelswarm",
        "root": card.parent or card.name,
        "parent": card.parent or None,
        "max_model_len": card.max_length or None,
        "vocab_size": card.vocabulary or None,
        "ready": card.ready,
        **_chat_state(card),
    }


def _chat_state(card: ModelCard) -> dict[str, Any]:
    """Return whether the model can chat (None: not known yet), and the sentence that chats are refused with."""
    chat = None if card.tokenizer is None else not card.chat_problem
    return {"chat": chat, "chat_problem": card.chat_problem or None}


def _state_routes(
    app: FastAPI, service: GenerationService, unready: Callable[[], str | None]
) -> None:
    @app.api_route("/health", methods=READ_METHODS)
    @app.api_route("/live", methods=READ_METHODS)
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.api_route("/ready", methods=READ_METHODS)
    async def ready() -> Response:
        reason = "the gateway is stopping" if service.shutting_down else unready()
        return JSONResponse(
            {
                "ready": reason is None,
                "reason": reason,
                "models": [_model_readiness(card) for card in service.backend.model_cards()],
            },
            status_code=200 if reason is None else 503,
        )


def _version_route(app: FastAPI, ports: Mapping[str, int]) -> None:
    protocol = ".".join(map(str, PROTOCOL_VERSION))

    @app.api_route("/version", methods=READ_METHODS)
    async def version() -> Response:
        announced = {"grpc_port": ports.get("grpc"), "admin_port": ports.get("admin")}
        return JSONResponse({"version": __version__, "protocol": protocol, **announced})


def _model_readiness(card: ModelCard) -> dict[str, Any]:
    return {
        "model": card.name,
        "ready": card.ready,
        "missing_blocks": list(card.missing_blocks),
        "tokenizer_loaded": card.tokenizer is not None,
        "phase": card.phase,
        "reason": card.reason or None,
        "chat_problem": card.chat_problem or None,
    }


def _unready_reason(backend: SessionBackend) -> str | None:
    """Return why no model is ready; None when one is. Failed links are named; their causes have addresses of servers,
    which `Swarm.List` tells on the admin port."""
    cards = backend.model_cards()
    if any(card.ready for card in cards):
        return None
    reasons = [f"{card.name}: {card.reason}" for card in cards] or ["no server is linked"]
    failed = sorted(name_of(peer) for peer, why in backend.unlinked_servers().items() if why)
    reasons += [f"cannot link to {', '.join(failed)}"] if failed else []
    return "; ".join(reasons)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    set_outcome(request.scope, error.code)
    if is_messages_path(request.url.path) or ANTHROPIC_VERSION in request.headers:
        return messages_error_response(error)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Return the error response for a request that the framework refuses: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 405:
        headers["allow"] = ", ".join(_methods_of(request))
        code = Code.METHOD_NOT_ALLOWED
        message = f"{shorten(request.method)} is not allowed here; allowed: {headers['allow']}"
        if request.method == "OPTIONS" and "origin" in request.headers:
            message += "; browsers need an origin that the gateway's --cors-origin allows"
    else:
        code, path = Code.NOT_FOUND, shorten(request.url.path)
        message = f"this is a ModelSwarm gateway; there is nothing at {path}. It has {ROUTES}"
    response = await _api_error(request, ApiError(code, message))
    response.headers.update(headers)
    return response


def _methods_of(request: Request) -> list[str]:
    """Return the methods of the request's path; the framework knows those of its first route only."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


async def _internal_error(request: Request, error: Exception) -> Response:
    return await _api_error(request, ApiError(Code.INTERNAL, "internal error"))
