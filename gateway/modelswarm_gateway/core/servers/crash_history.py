"""Recent crashes under one name: a server that crashes in a loop is a new peer each time.

Pure; kept by `health.py`. The name stays the same while processes change: the name of a pod whose container is
restarted, or of a run file. The first crash costs nothing, since restarts happen; the second within about a minute
does. Knows nothing of the health of a running server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId, name_of

# Time in seconds after which a crash counts half.
HALF_LIFE = 60.0
# Number of decayed crashes below which the next process starts without errors.
MIN_CRASHES = 1.5
# Number of names that are remembered.
MAX_NAMES = 1024


@dataclass(slots=True)
class _Process:
    peer: PeerId
    crashes: float = 0.0  # of its predecessors, decayed
    started_at: float = 0.0
    announced_stop: bool = False


class CrashHistory:
    def __init__(self) -> None:
        self._last: dict[str, _Process] = {}  # by name, oldest first

    def on_start(self, peer: PeerId, now: float) -> float:
        """Return the crashes under its name that count against this process; 0 if they are too few."""
        name = name_of(peer)
        before = self._last.pop(name, None)
        process = self._last[name] = _Process(peer, started_at=now)
        if before is not None:
            age = max(0.0, now - before.started_at)
            process.crashes = before.crashes * math.exp2(-age / HALF_LIFE)
            process.crashes += before.peer != peer and not before.announced_stop
        if len(self._last) > MAX_NAMES:
            del self._last[next(iter(self._last))]
        return process.crashes if process.crashes >= MIN_CRASHES else 0.0

    def on_announced_stop(self, peer: PeerId) -> None:
        """The process said that it would stop, so its end is no crash."""
        process = self._last.get(name_of(peer))
        if process is not None and process.peer == peer:
            process.announced_stop = True
