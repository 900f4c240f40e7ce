"""Time as this process has lived it: it stands still while our own loop does (R21), so nobody is suspected for that.

Pure: `now` comes in. Used by `detection.py`. Items that came while we stalled are read after the tick that ends
the stall, so a tick lets this clock go on by little however late it is.
"""

from __future__ import annotations

MAX_PER_TICK = 0.1  # seconds; ticks come every 50 ms


class StallClock:
    def __init__(self) -> None:
        self._ticked: float | None = None
        self._elapsed = 0.0

    def advance(self, now: float) -> float:
        """Seconds for which we stood still."""
        before, delay = self._elapsed, self.tick_delay(now)
        self._elapsed = self.elapsed(now)
        self._ticked = now
        return max(0.0, delay - (self._elapsed - before))

    def elapsed(self, now: float) -> float:
        """The time lived by `now`, since it was first asked. Never goes back."""
        if self._ticked is None:
            self._ticked = now
        return self._elapsed + min(self.tick_delay(now), MAX_PER_TICK)

    def tick_delay(self, now: float) -> float:
        """Seconds since the last tick."""
        return 0.0 if self._ticked is None else max(0.0, now - self._ticked)
