"""Explanation of routes: the present cost of every server, and the alternatives of each session's route.

Called by `gateway.py` for `modelswarm routes`. Reads everything and changes nothing; knows no protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.interface.views import HopView
from modelswarm_gateway.core.recovery.route_planner import hop_needs
from modelswarm_gateway.core.routing.cost_model import HopCost
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.server import Server
from modelswarm_gateway.core.servers.variant import serves
from modelswarm_gateway.core.sessions.session import Session


@dataclass(frozen=True, slots=True)
class ServerCost:
    """Present cost of a hop on one server for a new session, in milliseconds."""

    peer: PeerId
    model: str
    first: int
    last: int
    zone: str
    block_ms: float  # for every block, under the present load, divided by the score
    hop_ms: float  # once, divided by the score
    wait_ms: float  # part of hop_ms for queued rows, and for KV if no page is free
    rtt_ms: float | None  # to this gateway
    load: float  # sessions in a turn, of all gateways, hops being opened included
    score: float  # health, in (0, 1]
    # Cause why it is a last resort: draining, ejected or failing; canary: about to return; else "".
    state: str


@dataclass(frozen=True, slots=True)
class HopExplanation:
    """One hop and the choice that placed it."""

    peer: PeerId
    first: int
    last: int
    route_hop: RouteHop | None  # costs as known at that time; None: taken over


@dataclass(frozen=True, slots=True)
class SessionExplanation:
    """The route of one session, its present cost, and the best route at present."""

    session: str
    model: str
    state: str
    hops: tuple[HopExplanation, ...]
    cost_ms: float | None  # of its route now; None if one of its servers is disconnected
    best_ms: float | None  # of the best route at present
    best: tuple[HopView, ...]


@dataclass(frozen=True, slots=True)
class RouteExplanations:
    """All servers and sessions of one model, or of all models."""

    servers: tuple[ServerCost, ...]
    sessions: tuple[SessionExplanation, ...]


def explain_routes(
    registry: ServerRegistry, sessions: Iterable[Session], model: str, now: float
) -> RouteExplanations:
    """Explain the servers and sessions of one model; "" means all models."""
    servers = [each for each in registry if not model or serves(each.hello, model)]
    wanted = [each for each in sessions if model in ("", each.model)]
    return RouteExplanations(
        tuple(_server_cost(registry, each, now) for each in servers),
        tuple(_session_explanation(registry, each, now) for each in wanted),
    )


def _server_cost(registry: ServerRegistry, server: Server, now: float) -> ServerCost:
    hello, cost = server.hello, registry.costs.hop_cost(server, now)
    return ServerCost(
        peer=hello.peer,
        model=hello.model,
        first=hello.first,
        last=hello.last,
        zone=hello.zone,
        block_ms=cost.block_ms,
        hop_ms=cost.hop_ms,
        wait_ms=cost.queue_ms + server.predicted_wait_ms(1, for_recovery=False),
        rtt_ms=server.rtt_ms,
        load=cost.load,
        score=cost.status.score,
        state=_last_resort_cause(server, cost),
    )


def _last_resort_cause(server: Server, cost: HopCost) -> str:
    if server.draining:
        return "draining"
    if cost.status.ejected:
        return "ejected"
    if cost.last_resort:
        return "failing"
    return "canary" if cost.status.canary else ""


def _session_explanation(
    registry: ServerRegistry, session: Session, now: float
) -> SessionExplanation:
    cost: float | None = None
    best: list[tuple[PeerId, int, int]] = []
    best_ms: float | None = None
    if session.variant is not None and session.hops:
        route = [(hop.peer, hop.first, hop.last) for hop in session.hops]
        if all(registry.is_connected(hop.peer) for hop in session.hops):
            cost = registry.costs.route_cost(session.model, session.variant, route, now)
        best_hops = registry.costs.choose_hops(
            session.model,
            session.variant,
            session.blocks,
            now,
            between=(None, None),
            needs=hop_needs(session, frozenset()),
            cheapest=True,
        )
        if best_hops:
            best = [(hop.peer, hop.first, hop.last) for hop in best_hops]
            # Added up the same way as `cost`, so that the two compare.
            best_ms = registry.costs.route_cost(session.model, session.variant, best, now)
    return SessionExplanation(
        session=session.name,
        model=session.model,
        state=session.state.value,
        hops=tuple(
            HopExplanation(hop.peer, hop.first, hop.last, hop.route_hop) for hop in session.hops
        ),
        cost_ms=cost,
        best_ms=best_ms,
        best=tuple(HopView(*blocks) for blocks in best),
    )
