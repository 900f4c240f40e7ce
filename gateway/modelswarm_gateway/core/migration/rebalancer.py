"""Moves sessions from servers that have too many of them to equals that have few, one at a time and as planned (R13).

Ticked by `gateway.py`. Gathers what `rebalance.py` judges by and picks the session; how it is moved is for `moves.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from modelswarm_gateway.core.migration.imbalance import LEAD, Load, Rebalance, Shift
from modelswarm_gateway.core.migration.migration import beside
from modelswarm_gateway.core.migration.migrations import Moves
from modelswarm_gateway.core.recovery.route_planner import bad_neighbours
from modelswarm_gateway.core.routing.server_registry import Fleet
from modelswarm_gateway.core.servers.server import Server
from modelswarm_gateway.core.servers.variant import kind_of
from modelswarm_gateway.core.sessions.session import Hop, Session, State

LOOK_SECONDS = 1.0


class Balancer:
    def __init__(
        self, seconds: float, fleet: Fleet, sessions: Mapping[str, Session], moves: Moves
    ) -> None:
        """`seconds`: see `Rebalance`."""
        self._seconds = seconds
        self._fleet = fleet
        self._sessions = sessions
        self._moves = moves
        self._rebalance = Rebalance(seconds)
        self._looked_at = 0.0

    def tick(self, now: float) -> None:
        if not self._seconds or now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        shift = self._rebalance.look(self._groups(now), now)
        if shift is not None and self._moves.idle and self._shift(shift, now):
            self._rebalance.began(now)

    def _groups(self, now: float) -> dict[Hashable, list[Load]]:
        """The servers that could take each other's place, where one of them has many sessions of ours."""
        running = (s for s in self._sessions.values() if s.state is State.RUNNING)
        own = Counter(hop.peer for session in running for hop in session.hops)
        busy = [self._fleet.get(peer) for peer, count in own.items() if count >= LEAD]
        spans = {_span(server): server for server in busy if server}  # one of each
        return {
            span: [
                Load(peer, own[peer], max(equal.load, own[peer]))
                for equal in self._fleet.equals(server)
                if does_well(self._fleet, equal, now) and (peer := equal.hello.peer)
            ]
            for span, server in spans.items()
        }

    def _shift(self, shift: Shift, now: float) -> bool:
        there = movable(self._fleet, self._sessions.values(), shift, now)
        return any(self._moves.shift(session, hop, shift.new, now) for session, hop in there)


def does_well(fleet: Fleet, server: Server, now: float) -> bool:
    """Whether sessions may be moved to it that have no need to."""
    standing = fleet.standing(server.hello.peer, now)
    return not (server.draining or standing.ejected or standing.canary)


def movable(
    fleet: Fleet, sessions: Iterable[Session], shift: Shift, now: float
) -> list[tuple[Session, Hop]]:
    """Sessions that could go where the shift says, with their hops there, the shortest first: they cost least."""
    parted = fleet.bad_pairs(now)
    there = [
        (session, session.hops[peers.index(shift.old)])
        for session in sessions
        if (peers := [hop.peer for hop in session.hops]).count(shift.old) == 1
        and shift.new not in peers
    ]
    return [
        (session, hop)
        for session, hop in sorted(there, key=lambda found: found[0].length)
        if shift.new not in bad_neighbours(beside(session, hop), parted)
    ]


def _span(server: Server) -> Hashable:
    hello = server.hello
    return hello.model, kind_of(hello), hello.first, hello.last
