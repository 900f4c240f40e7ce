"""Why routes are as they are: what every server costs now, and what each session's route was chosen against.

Called by `gateway.py` for whoever asks (`modelswarm routes`); looks at everything and changes nothing.
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
from modelswarm_gateway.core.sessions.session import Session


@dataclass(frozen=True, slots=True)
class ServerCost:
    """What a hop on one server costs a new session now; milliseconds."""

    peer: PeerId
    model: str
    first: int
    last: int
    zone: str
    block_ms: float  # for every block, under the present load, divided by the score
    hop_ms: float  # once, divided by the score
    wait_ms: float  # of that for rows that queue; and for KV, if not even a page of it is free
    rtt_ms: float | None  # of this gateway
    load: float  # sessions in a turn, of all gateways, with what is on its way
    score: float  # health, in (0, 1]
    state: str  # "", or why it is a last resort: draining, ejected, failing; canary: about to come back


@dataclass(frozen=True, slots=True)
class HopExplanation:
    peer: PeerId
    first: int
    last: int
    route_hop: RouteHop | None  # with what was known then; None: taken over


@dataclass(frozen=True, slots=True)
class SessionExplanation:
    session: str
    model: str
    state: str
    hops: tuple[HopExplanation, ...]
    cost_ms: float | None  # of its route now; None if a server of it is gone
    best_ms: float | None  # of the best route there is now
    best: tuple[HopView, ...]


@dataclass(frozen=True, slots=True)
class RouteExplanations:
    servers: tuple[ServerCost, ...]
    sessions: tuple[SessionExplanation, ...]


def explain_routes(
    registry: ServerRegistry, sessions: Iterable[Session], model: str, now: float
) -> RouteExplanations:
    """About one model; "" for all."""

    def wanted(name: str) -> bool:
        return not model or name == model

    return RouteExplanations(
        tuple(_server_cost(registry, each, now) for each in registry if wanted(each.hello.model)),
        tuple(_session_explanation(registry, each, now) for each in sessions if wanted(each.model)),
    )


def _server_cost(registry: ServerRegistry, server: Server, now: float) -> ServerCost:
    hello, price = server.hello, registry.costs.hop_cost(server, now)
    return ServerCost(
        peer=hello.peer,
        model=hello.model,
        first=hello.first,
        last=hello.last,
        zone=hello.zone,
        block_ms=price.block_ms,
        hop_ms=price.hop_ms,
        wait_ms=price.queue_ms + server.predicted_wait_ms(1, for_recovery=False),
        rtt_ms=server.rtt_ms,
        load=price.load,
        score=price.status.score,
        state=_last_resort_cause(server, price),
    )


def _last_resort_cause(server: Server, price: HopCost) -> str:
    if server.draining:
        return "draining"
    if price.status.ejected:
        return "ejected"
    if price.last_resort:
        return "failing"
    return "canary" if price.status.canary else ""


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
        legs = registry.costs.choose_hops(
            session.model,
            session.variant,
            (0, session.variant.n_blocks),
            now,
            between=(None, None),
            needs=hop_needs(session, frozenset()),
            cheapest=True,
        )
        if legs:
            best = [(leg.peer, leg.first, leg.last) for leg in legs]
            best_ms = registry.costs.route_cost(
                session.model, session.variant, best, now
            )  # added up alike
    return SessionExplanation(
        session=session.name,
        model=session.model,
        state=session.state.value,
        hops=tuple(
            HopExplanation(hop.peer, hop.first, hop.last, hop.route_hop) for hop in session.hops
        ),
        cost_ms=cost,
        best_ms=best_ms,
        best=tuple(HopView(*leg) for leg in best),
    )
