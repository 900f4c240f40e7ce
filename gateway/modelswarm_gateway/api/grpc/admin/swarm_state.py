"""Snapshot of the swarm as this gateway sees it, as messages of api.proto. Used by the Swarm service."""

from __future__ import annotations

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.backend.protocol import SessionBackend
from modelswarm_gateway.core.interface.views import ServerView, SessionView
from modelswarm_gateway.core.routing.server_registry import SLOW_CAUSE
from modelswarm_gateway.errors import ApiError, Code, shorten


def check_model(backend: SessionBackend, model: str) -> None:
    """Raise ApiError unless `model` is known here, or empty, which means all models."""
    known = sorted(
        {card.name for card in backend.model_cards()} | {v.model for v in backend.servers()}
    )
    if model and model not in known:
        there = f"known are: {', '.join(known)}" if known else "no server has answered yet"
        detail = f"{shorten(model)!r} is not served here; {there}"
        raise ApiError(Code.MODEL_NOT_FOUND, detail, param="model")


def build_snapshot(backend: SessionBackend, model: str = "") -> api_pb2.Snapshot:
    """Return models, servers and sessions of `model`; of all models if it is empty."""

    def wanted(name: str) -> bool:
        return not model or name == model

    return api_pb2.Snapshot(
        models=[_model(card) for card in backend.model_cards() if wanted(card.name)],
        servers=[_server(view) for view in backend.servers() if wanted(view.model)],
        sessions=[_session(view) for view in backend.sessions() if wanted(view.model)],
        unlinked=[
            api_pb2.UnlinkedServer(peer=peer, reason=reason)
            for peer, reason in sorted(backend.unlinked_servers().items())
        ],
    )


def _model(card: ModelCard) -> api_pb2.ModelState:
    return api_pb2.ModelState(
        model=card.name,
        revision=card.revision,
        n_blocks=card.n_blocks,
        ready=card.ready,
        missing_blocks=card.missing_blocks,
        tokenizer_loaded=card.tokenizer is not None,
        phase=card.phase,
        reason=card.reason,
        chat_problem=card.chat_problem,
    )


def _server(view: ServerView) -> api_pb2.Server:
    made = api_pb2.Server(
        peer=view.peer,
        target=view.target,
        model=view.model,
        revision=view.revision,
        first=view.first,
        last=view.last,
        n_blocks=view.n_blocks,
        health=_health(view),
        score=view.score,
        own_sessions=view.own_sessions,
        numerics=view.numerics,
    )
    if view.heartbeat is not None:
        heartbeat = view.heartbeat
        made.free_pages, made.total_pages = heartbeat.free_pages, heartbeat.total_pages
        made.sessions, made.step_ms = heartbeat.sessions, heartbeat.step_ms
        made.steps, made.rows = heartbeat.steps, heartbeat.rows
    return made


def _health(view: ServerView) -> str:
    if view.drain_cause and view.drain_cause != SLOW_CAUSE:
        return "draining"
    if view.suspected:
        return "suspected"
    return "ejected" if view.ejected or view.drain_cause else "linked"


def _session(view: SessionView) -> api_pb2.Session:
    return api_pb2.Session(
        id=view.session,
        model=view.model,
        state=view.state,
        epoch=view.epoch.counter,
        length=view.length,
        route=[api_pb2.Hop(peer=h.peer, first=h.first, last=h.last) for h in view.route],
        waits_for_reader=view.waits_for_reader,
        hold_reason=view.hold_reason,
    )
