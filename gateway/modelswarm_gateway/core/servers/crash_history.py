"""How often the process under one name has died lately: a server that crashes over and over is a new peer each time.

Pure; kept by `health.py`. The name is what stays while processes come and go: of a pod whose container is restarted,
of a member of the folder. A first death costs nothing, since restarts happen; the second within a minute or so does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId, name_of

HALF_LIFE = 60.0  # seconds; a death counts half after them
MIN_CRASHES = 1.5  # deaths, as they count; below, nothing is held against the next life
MAX_NAMES = 1024  # names


@dataclass(slots=True)
class _Process:
    peer: PeerId
    crashes: float = 0.0  # of those before it
    started_at: float = 0.0
    announced_stop: bool = False  # as it had said that it would


class CrashHistory:
    def __init__(self) -> None:
        self._last: dict[str, _Process] = {}  # by name, oldest first

    def on_start(self, peer: PeerId, now: float) -> float:
        """The deaths under its name that count against this life; 0 for what may happen to anybody."""
        name = name_of(peer)
        before = self._last.pop(name, None)
        life = self._last[name] = _Process(peer, started_at=now)
        if before is not None:
            life.crashes = before.crashes * math.exp2(-max(0.0, now - before.started_at) / HALF_LIFE)
            life.crashes += before.peer != peer and not before.announced_stop
        if len(self._last) > MAX_NAMES:
            del self._last[next(iter(self._last))]
        return life.crashes if life.crashes >= MIN_CRASHES else 0.0

    def on_announced_stop(self, peer: PeerId) -> None:
        """It had said that it would end: no death."""
        life = self._last.get(name_of(peer))
        if life is not None and life.peer == peer:
            life.announced_stop = True
