"""Servers that look slow and have nobody to be compared with: an equal that has less to do gets one of their sessions.

Used by `detection.py`. Where a single session runs, its server's equals rest, and nothing can be said against it that
is fair: its own past was perhaps a shorter context, other servers have other work. A session on an equal makes the two
comparable, by a move that no reader notices (R13); who is slow is for `slowness.py` to say after that.
"""

from __future__ import annotations

from collections.abc import Collection

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.migration.imbalance import Shift
from modelswarm_gateway.core.migration.migrations import Migrations
from modelswarm_gateway.core.migration.rebalancer import can_receive, sessions_to_shift
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.sessions.session import Session

PROBE_INTERVAL = 60.0  # between two of one server


class Probes:
    def __init__(self, registry: ServerRegistry, migrations: Migrations) -> None:
        self._registry = registry
        self._migrations = migrations
        self._probed_at: dict[PeerId, float] = {}

    def remove_server(self, peer: PeerId) -> None:
        self._probed_at.pop(peer, None)

    def start_probe(self, peer: PeerId, sessions: Collection[Session], now: float) -> PeerId | None:
        """The equal that one of its sessions goes to; None: not now, or there is none."""
        if now - self._probed_at.get(peer, -PROBE_INTERVAL) < PROBE_INTERVAL or not self._migrations.is_idle:
            return None
        server = self._registry.get(peer)
        if server is None:
            return None
        equals = [
            equal
            for equal in self._registry.replicas_of(server)
            if equal is not server
            and equal.load < server.load
            and can_receive(self._registry, equal, now)
        ]
        for equal in sorted(equals, key=lambda equal: (equal.load, equal.hello.peer)):
            shift = Shift(peer, equal.hello.peer)
            for session, hop in sessions_to_shift(self._registry, sessions, shift, now):
                if self._migrations.migrate(session, hop, shift.target, now):
                    self._probed_at[peer] = now
                    return shift.target
        return None
