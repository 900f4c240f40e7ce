"""Servers that sessions are moved away from, and why: each until its last cause is taken back.

Kept by `fleet.py`, acted on by `moves.py`. They are remembered while their links are down: they may come back.
"""

from __future__ import annotations

from collections.abc import Collection

from modelswarm.protocol.identity import PeerId

STOPPING = "stopping"  # the cause of a server that says itself that it is about to end
MOST = 1024  # servers that are remembered, those that are gone included


class Leaving:
    def __init__(self) -> None:
        self._causes: dict[PeerId, list[str]] = {}  # in the order that they came in

    @property
    def peers(self) -> Collection[PeerId]:
        return self._causes.keys()

    def why(self, peer: PeerId) -> str:
        """The cause that came first; "": it is not to be left."""
        return next(iter(self._causes.get(peer, ())), "")

    def add(self, peer: PeerId, why: str) -> None:
        causes = self._causes.setdefault(peer, [])
        if why not in causes:
            causes.append(why)
        if len(self._causes) > MOST:
            del self._causes[next(iter(self._causes))]

    def take_back(self, peer: PeerId, why: str) -> bool:
        """Whether that was the last cause."""
        causes = self._causes.get(peer, [])
        if why not in causes:
            return False
        causes.remove(why)
        if causes:
            return False
        del self._causes[peer]
        return True

    def is_for(self, peer: PeerId, why: str) -> bool:
        return why in self._causes.get(peer, ())

    def all_for(self, why: str) -> frozenset[PeerId]:
        return frozenset(peer for peer, causes in self._causes.items() if why in causes)
