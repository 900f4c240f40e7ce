"""When which peer is due a Beat (R21): often while routes run between the two, every few seconds otherwise.

Used by the shells of gateways and servers, each with its own times. Anything that is said is a sign of life, so whoever
sends data needs no Beats for that; but only a Beat tells how a process does, and that is news also, and most of all, to
a peer that hears nothing but data. Pure: time comes in. Does not know what a Beat says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId

BUSY_SECONDS = 0.1
IDLE_SECONDS = 5.0
LEAST_LEASE = 4 * BUSY_SECONDS  # of what lives, no lease may end between two of its beats (R19)


@dataclass(slots=True)
class _Said:
    anything: float = -math.inf
    beat: float = -math.inf  # the first one is due at once
    busy: bool = False  # when it was last asked about


class BeatTimer:
    def __init__(
        self,
        busy_seconds: float,
        idle_seconds: Callable[[], float],
        status_seconds: float = math.inf,
    ) -> None:
        """`idle_seconds` is asked at every look. `status_seconds`: a peer hears no data for longer than this without
        a Beat among them; infinite for whose Beats say nothing but that it lives."""
        self._busy = busy_seconds
        self._idle = idle_seconds
        self._status = status_seconds
        self._said: dict[PeerId, _Said] = {}

    @property
    def peers(self) -> list[PeerId]:
        return list(self._said)

    def join(self, peer: PeerId) -> None:
        self._said[peer] = _Said()

    def leave(self, peer: PeerId) -> None:
        self._said.pop(peer, None)

    def sent(self, peer: PeerId, now: float) -> None:
        if said := self._said.get(peer):
            said.anything = now

    def due(self, now: float, busy: Collection[PeerId]) -> list[PeerId]:
        """Who is to be sent a beat now; counts as sent. `busy`: those with whom routes run."""
        idle = self._idle()
        found = []
        for peer, said in self._said.items():
            rests, said.busy = said.busy and peer not in busy, peer in busy
            if self._is_due(said, now, idle, rests):
                said.anything = said.beat = now
                found.append(peer)
        return found

    def _is_due(self, said: _Said, now: float, idle: float, rests: bool) -> bool:
        """`rests`: it was busy until a moment ago, and has last heard of the load that was."""
        if now - said.anything >= (self._busy if said.busy else idle):
            return True
        if math.isinf(self._status):
            return False
        return rests or now - said.beat >= (self._status if said.busy else idle)
