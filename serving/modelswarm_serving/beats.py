"""When which gateway is due a Beat (R21): every 5 s, and every 100 ms while sessions of its run here.

Used by `node.py`. Anything else that was sent to a gateway counts as a beat. Pure: time comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from modelswarm.protocol.identity import PeerId

BUSY_SECONDS = 0.1
IDLE_SECONDS = 5.0


class BeatTimer:
    def __init__(self, jitter: Callable[[], float], busy_seconds: float = BUSY_SECONDS) -> None:
        """`jitter` gives numbers in [0, 1): idle beats of many servers do not come at once."""
        self._jitter = jitter
        self._busy = busy_seconds - BUSY_SECONDS / 2
        self._said: dict[PeerId, float] = {}

    @property
    def peers(self) -> list[PeerId]:
        return list(self._said)

    def join(self, gateway: PeerId) -> None:
        self._said[gateway] = float("-inf")  # the first beat is due at once

    def leave(self, peer: PeerId) -> None:
        self._said.pop(peer, None)

    def sent(self, peer: PeerId, now: float) -> None:
        if peer in self._said:
            self._said[peer] = now

    def due(self, now: float, busy: Collection[PeerId]) -> list[PeerId]:
        """Who is to be sent a beat now; counts as sent. `busy`: the gateways with sessions that run here.

        Asked every BUSY_SECONDS: whoever would hear nothing for longer than is promised until then is due now.
        """
        idle = IDLE_SECONDS * (0.75 + 0.25 * self._jitter())
        found = [
            peer
            for peer, said in self._said.items()
            if now - said >= (self._busy if peer in busy else idle)
        ]
        for peer in found:
            self._said[peer] = now
        return found
