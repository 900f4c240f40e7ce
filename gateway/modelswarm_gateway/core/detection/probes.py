"""Servers that look slow and have nobody to be compared with: an equal that has less to do gets one of their sessions.

Used by `detection.py`. Where a single session runs, its server's equals rest, and nothing can be said against it that
is fair: its own past was perhaps a shorter context, other servers have other work. A session on an equal makes the two
comparable, by a move that no reader notices (R13); who is slow is for `slowness.py` to say after that.
"""

from __future__ import annotations

from collections.abc import Collection

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.migration.imbalance import Shift
from modelswarm_gateway.core.migration.migrations import Moves
from modelswarm_gateway.core.migration.rebalancer import does_well, movable
from modelswarm_gateway.core.routing.server_registry import Fleet
from modelswarm_gateway.core.sessions.session import Session

TRIAL_SECONDS = 60.0  # between two of one server


class Trials:
    def __init__(self, fleet: Fleet, moves: Moves) -> None:
        self._fleet = fleet
        self._moves = moves
        self._tried_at: dict[PeerId, float] = {}

    def left(self, peer: PeerId) -> None:
        self._tried_at.pop(peer, None)

    def begin(self, peer: PeerId, sessions: Collection[Session], now: float) -> PeerId | None:
        """The equal that one of its sessions goes to; None: not now, or there is none."""
        if now - self._tried_at.get(peer, -TRIAL_SECONDS) < TRIAL_SECONDS or not self._moves.idle:
            return None
        server = self._fleet.get(peer)
        if server is None:
            return None
        equals = [
            equal
            for equal in self._fleet.equals(server)
            if equal is not server
            and equal.load < server.load
            and does_well(self._fleet, equal, now)
        ]
        for equal in sorted(equals, key=lambda equal: (equal.load, equal.hello.peer)):
            shift = Shift(peer, equal.hello.peer)
            for session, hop in movable(self._fleet, sessions, shift, now):
                if self._moves.shift(session, hop, shift.new, now):
                    self._tried_at[peer] = now
                    return shift.new
        return None
