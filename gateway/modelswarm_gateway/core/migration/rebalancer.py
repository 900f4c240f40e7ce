"""The rebalancer: migrates sessions from servers that have too many of them to replicas that have few, one at a time.

Ticked by `gateway.py`. It gathers the loads that `imbalance.py` judges, and picks the session. Does not know how a
session is migrated (R13, migration; `migrations.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from modelswarm_gateway.core.migration.imbalance import MIN_LEAD, ImbalanceDetector, Load, Shift
from modelswarm_gateway.core.migration.migrations import Migrations
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.link_failures import unreliable_neighbours
from modelswarm_gateway.core.servers.server import Server
from modelswarm_gateway.core.servers.variant import variant_of
from modelswarm_gateway.core.sessions.session import Hop, Session, SessionState, ring_neighbours

# Time in seconds between two checks for an imbalance.
CHECK_INTERVAL = 1.0


class Rebalancer:
    def __init__(
        self,
        seconds: float,
        registry: ServerRegistry,
        sessions: Mapping[str, Session],
        migrations: Migrations,
    ) -> None:
        """`seconds`: see `ImbalanceDetector`."""
        self._seconds = seconds
        self._registry = registry
        self._sessions = sessions
        self._migrations = migrations
        self._imbalance = ImbalanceDetector(seconds)
        self._checked_at = 0.0

    def rebalance(self, now: float) -> None:
        """Start at most one migration; called at every tick."""
        if not self._seconds or now - self._checked_at < CHECK_INTERVAL:
            return
        self._checked_at = now
        shift = self._imbalance.find_shift(self._groups(now), now)
        if shift is not None and self._migrations.is_idle(now) and self._shift(shift, now):
            self._imbalance.on_started(now)

    def _groups(self, now: float) -> dict[Hashable, list[Load]]:
        """Return the loads of groups of replicas in which one server has many sessions of this gateway.

        Replicas of one numerics class come first, then all: the first group with a shift decides.
        """
        running = (s for s in self._sessions.values() if s.state is SessionState.RUNNING)
        own = Counter(hop.peer for session in running for hop in session.hops)
        busy = [
            self._registry.find_server(peer) for peer, count in own.items() if count >= MIN_LEAD
        ]
        spans = {_span_key(server): server for server in busy if server}  # one server of each
        groups: dict[Hashable, list[Load]] = {}
        for span, server in spans.items():
            by_class: dict[str, list[Load]] = {}
            for replica in self._registry.replicas_of(server):
                if can_receive(self._registry, replica, now):
                    peer = replica.hello.peer
                    load = Load(peer, own[peer], max(replica.load, own[peer]))
                    by_class.setdefault(replica.hello.numerics, []).append(load)
            if len(by_class) > 1:
                groups |= {(span, numerics): loads for numerics, loads in by_class.items()}
            groups[span] = [load for loads in by_class.values() for load in loads]
        return groups

    def _shift(self, shift: Shift, now: float) -> bool:
        there = sessions_to_shift(self._registry, self._sessions.values(), shift, now)
        return any(
            self._migrations.migrate(session, hop, shift.target, now) for session, hop in there
        )


def can_receive(registry: ServerRegistry, server: Server, now: float) -> bool:
    """True if the server may receive sessions that need not migrate."""
    status = registry.health_status(server.hello.peer, now)
    return not (server.draining or status.ejected or status.canary)


def sessions_to_shift(
    registry: ServerRegistry, sessions: Iterable[Session], shift: Shift, now: float
) -> list[tuple[Session, Hop]]:
    """Return the sessions that the shift could migrate, with their hops, the shortest first: they cost least."""
    unreliable = registry.links.unreliable(now)
    there = [
        (session, session.hops[peers.index(shift.source)])
        for session in sessions
        if (peers := [hop.peer for hop in session.hops]).count(shift.source) == 1
        and shift.target not in peers
    ]
    return [
        (session, hop)
        for session, hop in sorted(there, key=lambda found: found[0].length)
        if shift.target not in unreliable_neighbours(ring_neighbours(session, hop), unreliable)
    ]


def _span_key(server: Server) -> Hashable:
    hello = server.hello
    return hello.model, variant_of(hello), hello.first, hello.last
