"""Virtual time: a heap of events, run in order of time and then of insertion.

Everything in a simulated world happens through one Clock, so a seed replays exactly. Knows nothing of the swarm.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # run so far
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._inserted = 0

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        self._inserted += 1
        heapq.heappush(self._heap, (max(time, self.now), self._inserted, action, args))

    def after(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay, action, *args)

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._heap:
            return False
        self.now, _, action, args = heapq.heappop(self._heap)
        self.events += 1
        action(*args)
        return True
