"""Probe migrations: an undecided server's session is migrated to a replica, so that the two can be compared.

Used by `monitor.py`. If only one session runs, the replicas of its server are idle, and no fair comparison exists. The
server's own past may have been a shorter context, and other servers do other work. A session on a replica makes
the two comparable, by a migration that no client notices (R13, migration). Does not decide which server is slow: the
outlier detector does, afterwards.
"""

from __future__ import annotations

from collections.abc import Collection

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.migration.imbalance import Shift
from modelswarm_gateway.core.migration.migrations import Migrations
from modelswarm_gateway.core.migration.rebalancer import can_receive, sessions_to_shift
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.sessions.session import Session

# Least time in seconds between two probe migrations of one server.
PROBE_INTERVAL = 60.0


class Probes:
    def __init__(self, registry: ServerRegistry, migrations: Migrations) -> None:
        self._registry = registry
        self._migrations = migrations
        self._probed_at: dict[PeerId, float] = {}

    def remove_server(self, peer: PeerId) -> None:
        self._probed_at.pop(peer, None)

    def start_probe(self, peer: PeerId, sessions: Collection[Session], now: float) -> PeerId | None:
        """Migrate a session of `peer` to an idler replica. Returns the replica; None: not now, or there is none."""
        last = self._probed_at.get(peer, -PROBE_INTERVAL)
        if now - last < PROBE_INTERVAL or not self._migrations.is_idle(now):
            return None
        server = self._registry.find_server(peer)
        if server is None:
            return None
        replicas = [
            replica
            for replica in self._registry.replicas_of(server)
            if replica is not server
            and replica.load < server.load
            and can_receive(self._registry, replica, now)
        ]
        numerics = server.hello.numerics
        replicas.sort(key=lambda r: (r.hello.numerics != numerics, r.load, r.hello.peer))
        for replica in replicas:
            shift = Shift(peer, replica.hello.peer)
            for session, hop in sessions_to_shift(self._registry, sessions, shift, now):
                if self._migrations.migrate(session, hop, shift.target, now):
                    self._probed_at[peer] = now
                    return shift.target
        return None
