"""How often the process under one name has died lately: a server that crashes over and over is a new peer each time.

Pure; kept by `health.py`. The name is what stays while processes come and go: of a pod whose container is restarted,
of a member of the folder. A first death costs nothing, since restarts happen; the second within a minute or so does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId, name_of

HALF_LIFE = 60.0  # seconds; a death counts half after them
TWICE = 1.5  # deaths, as they count; below, nothing is held against the next life
REMEMBERED = 1024  # names


@dataclass(slots=True)
class _Life:
    peer: PeerId
    deaths: float = 0.0  # of those before it
    begun: float = 0.0
    ended: bool = False  # as it had said that it would


class Lives:
    def __init__(self) -> None:
        self._last: dict[str, _Life] = {}  # by name, oldest first

    def begin(self, peer: PeerId, now: float) -> float:
        """The deaths under its name that count against this life; 0 for what may happen to anybody."""
        name = name_of(peer)
        before = self._last.pop(name, None)
        life = self._last[name] = _Life(peer, begun=now)
        if before is not None:
            life.deaths = before.deaths * math.exp2(-max(0.0, now - before.begun) / HALF_LIFE)
            life.deaths += before.peer != peer and not before.ended
        if len(self._last) > REMEMBERED:
            del self._last[next(iter(self._last))]
        return life.deaths if life.deaths >= TWICE else 0.0

    def end(self, peer: PeerId) -> None:
        """It had said that it would end: no death."""
        life = self._last.get(name_of(peer))
        if life is not None and life.peer == peer:
            life.ended = True
