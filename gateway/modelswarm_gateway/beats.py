"""When which server is due a Beat of ours (R21): every 100 ms while our routes run there, every 5 s otherwise.

Used by `node.py`, which asks every 50 ms. Whatever was sent to a server counts as a beat. Pure: time comes in.
"""

from __future__ import annotations

from collections.abc import Collection

from modelswarm.protocol.identity import PeerId

BUSY_SECONDS = 0.1
IDLE_SECONDS = 5.0


class BeatTimer:
    def __init__(self, lease_seconds: float = 30.0) -> None:
        """A lease never ends for want of a beat (R19)."""
        self._idle = min(IDLE_SECONDS, lease_seconds / 4)
        self._said: dict[PeerId, float] = {}

    def join(self, server: PeerId, now: float) -> None:
        self._said[server] = now - self._idle  # the first beat is due at once

    def leave(self, server: PeerId) -> None:
        self._said.pop(server, None)

    def sent(self, server: PeerId, now: float) -> None:
        if server in self._said:
            self._said[server] = now

    def due(self, now: float, live: Collection[PeerId]) -> list[PeerId]:
        """Who is to be sent a beat now; counts as sent. `live`: servers on which our routes run."""
        found = [
            server
            for server, said in self._said.items()
            if now - said >= (BUSY_SECONDS if server in live else self._idle)
        ]
        for server in found:
            self._said[server] = now
        return found
