"""The route of a session: the hops that can stay, and servers for the blocks between them.

Used by the loop (`recovery.py`). Changes nothing: new hops are still legs here. Prices are the registry's; what is decided
here is which hops a session gives up: those of dead, refusing or shunned servers, one end of a pair of servers that
keeps failing, and between turns those that the session is better off without.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.routing.cost_model import Needs
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.variant import ModelVariant
from modelswarm_gateway.core.sessions.session import Hop, Session, SessionState, ring_neighbours

MAX_DETOURS = 32  # servers left out of a plan, in search of one without failing pairs

Plan: TypeAlias = list[Hop | RouteHop]


class RoutePlanner:
    def __init__(self, settings: GatewaySettings, registry: ServerRegistry) -> None:
        self._settings = settings
        self._registry = registry

    def plan_route(
        self, session: Session, variant: ModelVariant, without: frozenset[PeerId], now: float
    ) -> Plan | None:
        """Around the servers `without` and those that the session shuns. None: some block has no other."""
        without |= session.excluded
        if session.state is SessionState.PARKED:
            overloaded = self._overloaded_servers(session, now) - without
            if (
                overloaded
                and (
                    alternative := self._find_alternative(
                        session, variant, overloaded | without, now
                    )
                )
                is not None
            ):
                return alternative
        return self._avoid_unreliable_links(session, variant, without, now)

    def _avoid_unreliable_links(
        self, session: Session, variant: ModelVariant, excluded: frozenset[PeerId], now: float
    ) -> Plan | None:
        """A route free of pairs that keep failing (R5), or the one through those that failed least.

        Leaves out one or the other end of such a pair, a new hop before a kept one, then of what that brings.
        """
        best: Plan | None = None
        fewest = 0
        bad_pairs = self._registry.links.unreliable(now)
        mine = {hop.peer for hop in session.hops}
        without = [frozenset[PeerId]()]
        for left_out in without:  # grows below
            route = self._fill_gaps(session, variant, left_out | excluded, now)
            if route is None:
                continue
            bad = unreliable_links([hop.peer for hop in route], bad_pairs)
            if not bad:
                return route
            failures = sum(bad.values())
            if best is None or failures < fewest:
                best, fewest = route, failures
            ends = sorted(next(iter(bad)), key=lambda peer: (peer in mine, peer))
            if len(without) < MAX_DETOURS:
                without += [left_out | {peer} for peer in ends]
        return best

    def _fill_gaps(
        self, session: Session, variant: ModelVariant, without: frozenset[PeerId], now: float
    ) -> Plan | None:
        """The session's hops that can stay, and good servers for the blocks between them."""
        route: Plan = []
        kept = [
            h for h in session.hops if self._registry.is_connected(h.peer) and h.peer not in without
        ]
        needs = hop_needs(session, without, lost=[h for h in session.hops if h not in kept])
        edge = 0
        for hop in [*kept, None]:
            end = variant.n_blocks if hop is None else hop.first
            if edge < end:
                legs = self._registry.costs.choose_hops(
                    session.model,
                    variant,
                    (edge, end),
                    now,
                    between=(route[-1].peer if route else None, hop.peer if hop else None),
                    needs=needs,
                )
                if legs is None:
                    return None
                route += legs
            if hop is not None:
                route.append(hop)
                edge = hop.last
        return route

    # ---- affinity: a session keeps its route between turns, unless that breaks its patience

    def _overloaded_servers(self, session: Session, now: float) -> frozenset[PeerId]:
        """The servers of its route that a new turn had better not wait for."""
        more = session.turn.reserved_positions - session.length
        return frozenset(
            hop.peer for hop in session.hops if self._is_overloaded(hop.peer, max(0, more), now)
        )

    def _find_alternative(
        self, session: Session, variant: ModelVariant, without: frozenset[PeerId], now: float
    ) -> Plan | None:
        """A route without those servers, if nobody in it is as bad."""
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
            return False  # it is gone, and no matter of taste
        price = self._registry.costs.hop_cost(server, now)
        wait = server.predicted_wait_ms(positions, for_recovery=False) + price.queue_ms
        return price.last_resort or wait > 1000 * self._settings.affinity_seconds


def find_migration_targets(
    registry: ServerRegistry, session: Session, old: Hop, refused: set[PeerId], now: float
) -> list[RouteHop] | None:
    """Servers for the blocks of a hop that is to be left, none of them to be left itself; None: there are none.

    Those that have refused the session before are asked again, and forgotten, where nobody else is."""
    assert session.variant is not None, "a session that has hops has a kind"
    at = session.hops.index(old)
    before, after = session.hops[:at], session.hops[at + 1 :]
    between = before[-1].peer if before else None, after[0].peer if after else None
    left = frozenset(registry.drains.peers)
    parted = unreliable_neighbours(ring_neighbours(session, old), registry.links.unreliable(now))
    for without in (left | refused | parted, left | refused, left):
        needs = hop_needs(session, without)
        legs = registry.costs.choose_hops(
            session.model, session.variant, old.blocks, now, between=between, needs=needs
        )
        if legs is not None:
            break
    if without == left:
        refused.clear()
    return legs


def hop_needs(session: Session, without: frozenset[PeerId], lost: Sequence[Hop] = ()) -> Needs:
    """What the session asks of a server that is to carry a hop of it; `lost`: the hops that it replaces."""
    repair = session.has_run and session.is_recovering
    return Needs(
        max_length=session.turn.end,
        kv_positions=session.turn.reserved_positions,
        for_recovery=repair,
        lost_domains=frozenset(hop.zone for hop in lost if hop.zone) if repair else frozenset(),
        excluded=without,
    )


def unreliable_neighbours(
    peers: Collection[PeerId], bad_pairs: Mapping[frozenset[PeerId], int]
) -> frozenset[PeerId]:
    """Who had better not stand beside one of `peers`."""
    return frozenset(
        other
        for pair in bad_pairs
        for other in pair
        if any(p in pair and p != other for p in peers)
    )


def unreliable_links(
    route: Sequence[PeerId], bad_pairs: Mapping[frozenset[PeerId], int]
) -> dict[frozenset[PeerId], int]:
    """The pairs to avoid that a route has: neighbours, and tail and head, which the ring joins."""
    links = zip(route, [*route[1:], route[0]], strict=True)
    return {pair: bad_pairs[pair] for link in links if (pair := frozenset(link)) in bad_pairs}
