"""The route of a session: the hops that can stay, and servers for the blocks between them.

Used by the recovery loop, by migrations and by `explain.py`. Changes nothing: new hops are still choices here. Costs
come from `routing/`. It decides which hops a session gives up: hops of lost or excluded servers, and one end of an
unreliable link. Between turns a session also gives up hops with a long predicted wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.interface.row_sizes import BLOCK_ROWS_SINCE
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.routing.cost_model import Needs
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.routing.ring_search import find_ring
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.link_failures import unreliable_links, unreliable_neighbours
from modelswarm_gateway.core.servers.variant import ModelVariant, variants_of
from modelswarm_gateway.core.sessions.route_record import wanted_version
from modelswarm_gateway.core.sessions.session import (
    Hop,
    Session,
    SessionState,
    longest_chain,
    ring_neighbours,
)

Plan: TypeAlias = list[Hop | RouteHop]


class RoutePlanner:
    def __init__(self, settings: GatewaySettings, registry: ServerRegistry) -> None:
        self._settings = settings
        self._registry = registry

    def plan_route(self, session: Session, without: frozenset[PeerId], now: float) -> Plan | None:
        """Plan without `without` and the session's excluded servers; None if some block has no other server.

        A route whose tail could not sample is none, either.
        """
        route = self._find_route(session, without, now)
        if route is None or lacks_grammars(self._registry, session, route[-1]):
            return None
        return route

    def _find_route(self, session: Session, without: frozenset[PeerId], now: float) -> Plan | None:
        without |= session.excluded | incapable_servers(self._registry, session)
        variant = session.variant
        if variant is None:
            return None
        if session.fork is not None and not session.hops:
            route = self._parent_route(session, session.fork.parent, without, now)
            if route is not None:
                return route
        if session.state is SessionState.PARKED:
            overloaded = self._overloaded_servers(session, now) - without
            if overloaded:
                alternative = self._find_alternative(session, variant, overloaded | without, now)
                if alternative is not None:
                    return alternative
        return self._avoid_unreliable_links(session, variant, without, now)

    def _avoid_unreliable_links(
        self, session: Session, variant: ModelVariant, excluded: frozenset[PeerId], now: float
    ) -> Plan | None:
        """Return a route without unreliable links (R5, one loop), or one whose links failed least often."""
        route = self._fill_gaps(session, variant, excluded, now)
        bad_links = self._registry.links.unreliable(now)
        if route is None or not unreliable_links([hop.peer for hop in route], bad_links):
            return route
        mine = {hop.peer for hop in [*session.hops, *session.lost_hops]}
        found = self._registry.costs.spans_by_cost(session.model, variant, mine, now)
        without = excluded | tails_without_grammars(self._registry, session)
        spans = {peer: span for peer, span in found.items() if peer not in without}
        for fewest in sorted({0, *bad_links.values()})[:-1]:
            avoided = [link for link, failures in bad_links.items() if failures > fewest]
            ring = find_ring(spans, session.blocks, avoided)
            if ring is not None:
                return list(ring)
        return route

    def _fill_gaps(
        self, session: Session, variant: ModelVariant, without: frozenset[PeerId], now: float
    ) -> Plan | None:
        """Return the session's hops that can stay, and servers for the blocks between them."""
        route: Plan = []
        kept = longest_chain(
            hop
            for hop in [*session.hops, *session.lost_hops]
            if self._registry.is_connected(hop.peer)
            and hop.peer not in without
            and not lacks_grammars(self._registry, session, hop)
        )
        needs = hop_needs(session, without, lost=[h for h in session.hops if h not in kept])
        edge, last = session.blocks
        for hop in [*kept, None]:
            end = last if hop is None else hop.first
            if edge < end:
                new_hops = self._registry.costs.choose_hops(
                    session.model,
                    variant,
                    (edge, end),
                    now,
                    between=(route[-1].peer if route else None, hop.peer if hop else None),
                    needs=needs,
                )
                if new_hops is None:
                    return None
                route += new_hops
            if hop is not None:
                route.append(hop)
                edge = hop.last
        return route

    # ---- affinity: a session keeps its route between turns, unless the wait would be too long

    def _parent_route(
        self, session: Session, parent: Session, without: frozenset[PeerId], now: float
    ) -> Plan | None:
        """Return the route of the session that this one forks from (R15, forks), if all of it can take one more."""
        first, last = session.blocks
        edges = [first, *(hop.last for hop in parent.hops)]
        peers = [hop.peer for hop in parent.hops]
        is_whole = edges == [*(hop.first for hop in parent.hops), last]
        reserve = session.turn.reserved_positions
        if (
            not is_whole
            or len(set(peers)) < len(peers)  # one hop there needs half the pages
            or without.intersection(peers)
            or not all(self._registry.is_connected(peer) for peer in peers)
            or any(self._is_overloaded(peer, reserve, now) for peer in peers)
            or unreliable_links(peers, self._registry.links.unreliable(now))
        ):
            return None
        route: Plan = [
            hop.route_hop or RouteHop(hop.peer, hop.first, hop.last) for hop in parent.hops
        ]
        return None if lacks_grammars(self._registry, session, route[-1]) else route

    def _overloaded_servers(self, session: Session, now: float) -> frozenset[PeerId]:
        """Return servers on the current route whose predicted wait exceeds `affinity_seconds`."""
        more = session.turn.reserved_positions - session.length
        return frozenset(
            hop.peer for hop in session.hops if self._is_overloaded(hop.peer, max(0, more), now)
        )

    def _find_alternative(
        self, session: Session, variant: ModelVariant, without: frozenset[PeerId], now: float
    ) -> Plan | None:
        """Return a route without those servers; None if it is unreliable or has an overloaded server too."""
        route = self._fill_gaps(session, variant, without, now)
        if route is None or unreliable_links(
            [hop.peer for hop in route], self._registry.links.unreliable(now)
        ):
            return None
        new = [hop.peer for hop in route if isinstance(hop, RouteHop)]
        reserve = session.turn.reserved_positions
        return None if any(self._is_overloaded(peer, reserve, now) for peer in new) else route

    def _is_overloaded(self, peer: PeerId, positions: int, now: float) -> bool:
        server = self._registry.find_server(peer)
        if server is None:
            return False  # disconnected: not a question of affinity
        cost = self._registry.costs.hop_cost(server, now)
        wait = server.predicted_wait_ms(positions, for_recovery=False) + cost.queue_ms
        return cost.last_resort or wait > 1000 * self._settings.affinity_seconds


def find_migration_targets(
    registry: ServerRegistry, session: Session, old: Hop, refused: set[PeerId], now: float
) -> list[RouteHop] | None:
    """Return servers for the blocks of a hop that migrates, none of them drained itself; None if there are none.

    Servers in `refused` have refused the session before. If no other server is left, they are tried again and
    `refused` is cleared.
    """
    assert session.variant is not None, "a session that has hops has a variant"
    at = session.hops.index(old)
    before, after = session.hops[:at], session.hops[at + 1 :]
    between = before[-1].peer if before else None, after[0].peer if after else None
    drained = frozenset(registry.drains.peers)
    unreliable = unreliable_neighbours(
        ring_neighbours(session, old), registry.links.unreliable(now)
    )
    incapable = incapable_servers(registry, session) | unanswered_servers(session)
    for without in (drained | refused | unreliable, drained | refused, drained):
        needs = hop_needs(session, without | incapable)
        new_hops = registry.costs.choose_hops(
            session.model, session.variant, old.blocks, now, between=between, needs=needs
        )
        if new_hops is not None:
            break
    if without == drained:
        refused.clear()
    if new_hops is None or lacks_grammars(registry, session, new_hops[-1]):
        return None
    return new_hops


def can_replace(registry: ServerRegistry, session: Session, hop: Hop, peer: PeerId) -> bool:
    """True if a replica can run a hop that may as well stay.

    It has the session's adapter, and at the tail the same version of grammars (R17, sampling).
    """
    server = registry.find_server(peer)
    if server is None or peer in incapable_servers(registry, session) | unanswered_servers(session):
        return False
    if variants_of(server.hello).get(session.model) != session.variant:
        return False
    is_tail = hop.last == session.blocks[1]
    has_grammar = is_tail and session.turn.sampling.grammar is not None
    return not has_grammar or server.hello.grammar == hop.grammar_version


def lacks_grammars(registry: ServerRegistry, session: Session, hop: Hop | RouteHop) -> bool:
    """True for a tail of `tails_without_grammars`."""
    server = registry.find_server(hop.peer)
    if hop.last != session.blocks[1] or server is None or server.hello.grammar:
        return False
    return hop.peer in tails_without_grammars(registry, session)


def tails_without_grammars(registry: ServerRegistry, session: Session) -> frozenset[PeerId]:
    """Return tails that have no grammars, where the session needs them and another tail has them, or had.

    They would end the session instead of sampling (R17, sampling).
    """
    if session.turn.sampling.grammar is None:
        return frozenset()
    servers = registry.servers_of(session.model, session.variant)
    tails = [each.hello for each in servers if each.hello.last == session.blocks[1]]
    if not session.grammar_version and not any(tail.grammar for tail in tails):
        return frozenset()
    return frozenset(tail.peer for tail in tails if not tail.grammar)


def incapable_servers(registry: ServerRegistry, session: Session) -> frozenset[PeerId]:
    """Return servers whose version cannot run the turn: they would leave out rows of its blocks (R14, opaque rows)."""
    if not session.turn.prompt_rows:
        return frozenset()
    return registry.older_than(session.model, BLOCK_ROWS_SINCE)


def unanswered_servers(session: Session) -> frozenset[PeerId]:
    """Return servers that have not said yet whether another gateway has run the session there (R20, ownership).

    A hop that is created there could replace what ran last.
    """
    return frozenset() if session.query is None else frozenset(session.query.unanswered)


def hop_needs(session: Session, without: frozenset[PeerId], lost: Sequence[Hop] = ()) -> Needs:
    """Return the session's requirements for a new hop; `lost` are the hops that it replaces."""
    for_recovery = session.has_run and session.is_recovering
    return Needs(
        max_length=session.turn.end,
        kv_positions=session.turn.reserved_positions,
        for_recovery=for_recovery,
        lost_domains=frozenset(hop.zone for hop in lost if hop.zone and for_recovery),
        excluded=without,
        grammar=wanted_version(session),
        numerics=session.numerics,
    )
