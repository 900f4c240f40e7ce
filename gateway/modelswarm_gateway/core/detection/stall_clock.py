"""A clock that does not advance while our event loop is stalled (R21, failure detection).

So a stall of our own is not taken for a silent server. Pure: `now` is a parameter. Used by `monitor.py`. Messages that
arrived during a stall are read after the tick that ends it. So a tick advances this clock by little, however late it
is. Knows no servers.
"""

from __future__ import annotations

# Greatest advance in seconds per tick; ticks come every 50 ms.
MAX_PER_TICK = 0.1


class StallClock:
    def __init__(self) -> None:
        self._ticked: float | None = None
        self._elapsed = 0.0

    def advance(self, now: float) -> float:
        """Take a tick. Returns the seconds for which the loop was stalled."""
        before, delay = self._elapsed, self.tick_delay(now)
        self._elapsed = self.elapsed(now)
        self._ticked = now
        return max(0.0, delay - (self._elapsed - before))

    def elapsed(self, now: float) -> float:
        """Return the seconds since the first call, without stalls. Never decreases."""
        if self._ticked is None:
            self._ticked = now
        return self._elapsed + min(self.tick_delay(now), MAX_PER_TICK)

    def tick_delay(self, now: float) -> float:
        """Return the seconds since the last tick."""
        return 0.0 if self._ticked is None else max(0.0, now - self._ticked)
