"""Time as this process has lived it: it stands still while our own loop does (R21), so nobody is suspected for that.

Pure: `now` comes in. Used by `detection.py`. Items that came while we stalled are read after the tick that ends
the stall, so a tick lets this clock go on by little however late it is.
"""

from __future__ import annotations

MOST_PER_TICK = 0.1  # seconds; ticks come every 50 ms


class AwakeClock:
    def __init__(self) -> None:
        self._ticked: float | None = None
        self._lived = 0.0

    def tick(self, now: float) -> float:
        """Seconds for which we stood still."""
        before, late = self._lived, self.late(now)
        self._lived = self.read(now)
        self._ticked = now
        return max(0.0, late - (self._lived - before))

    def read(self, now: float) -> float:
        """The time lived by `now`, since it was first asked. Never goes back."""
        if self._ticked is None:
            self._ticked = now
        return self._lived + min(self.late(now), MOST_PER_TICK)

    def late(self, now: float) -> float:
        """Seconds since the last tick."""
        return 0.0 if self._ticked is None else max(0.0, now - self._ticked)
