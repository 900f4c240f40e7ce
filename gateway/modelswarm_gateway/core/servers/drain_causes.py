"""Servers that sessions are moved away from, and why: each until its last cause is taken back.

Kept by `server_registry.py`, acted on by `moves.py`. They are remembered while their links are down: they may come back.
"""

from __future__ import annotations

from collections.abc import Collection

from modelswarm.protocol.identity import PeerId

STOPPING = "stopping"  # the cause of a server that says itself that it is about to end
MAX_SERVERS = 1024  # servers that are remembered, those that are gone included


class DrainCauses:
    def __init__(self) -> None:
        self._causes: dict[PeerId, list[str]] = {}  # in the order that they came in

    @property
    def peers(self) -> Collection[PeerId]:
        return self._causes.keys()

    def first_cause(self, peer: PeerId) -> str:
        """The cause that came first; "": it is not to be left."""
        return next(iter(self._causes.get(peer, ())), "")

    def add_cause(self, peer: PeerId, cause: str) -> None:
        causes = self._causes.setdefault(peer, [])
        if cause not in causes:
            causes.append(cause)
        if len(self._causes) > MAX_SERVERS:
            del self._causes[next(iter(self._causes))]

    def remove_cause(self, peer: PeerId, cause: str) -> bool:
        """Whether that was the last cause."""
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
