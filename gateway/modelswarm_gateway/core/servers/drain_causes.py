"""The servers that sessions are migrated away from, with the causes: drained until the last cause is removed.

The part `registry.drains` of the server registry; `migrations.py` acts on it. Remembered while links are down: the
servers may reconnect. Knows no sessions.
"""

from __future__ import annotations

from collections.abc import Collection

from modelswarm.protocol.identity import PeerId

# The cause of a server that has announced that it is about to stop.
SHUTDOWN_CAUSE = "shutdown"
# Number of servers that are remembered, disconnected ones included.
MAX_SERVERS = 1024


class DrainCauses:
    def __init__(self) -> None:
        self._causes: dict[PeerId, list[str]] = {}  # in order of arrival

    @property
    def peers(self) -> Collection[PeerId]:
        return self._causes.keys()

    def first_cause(self, peer: PeerId) -> str:
        """Return the oldest cause; "" if the server is not drained."""
        return next(iter(self._causes.get(peer, ())), "")

    def add_cause(self, peer: PeerId, cause: str) -> None:
        causes = self._causes.setdefault(peer, [])
        if cause not in causes:
            causes.append(cause)
        if len(self._causes) > MAX_SERVERS:
            del self._causes[next(iter(self._causes))]

    def remove_cause(self, peer: PeerId, cause: str) -> bool:
        """Remove a cause. True if it was the last one."""
        causes = self._causes.get(peer, [])
        if cause not in causes:
            return False
        causes.remove(cause)
        if causes:
            return False
        del self._causes[peer]
        return True

    def has_cause(self, peer: PeerId, cause: str) -> bool:
        return cause in self._causes.get(peer, ())

    def peers_with(self, cause: str) -> frozenset[PeerId]:
        return frozenset(peer for peer, causes in self._causes.items() if cause in causes)
