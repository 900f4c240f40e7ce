"""Time in which this process got nothing done although it was not asked to wait: throttled, stopped, starved of a core.

Pure; used by `steps.py`. Steps do not show it: whoever gets 5 of every 100 ms mostly stands still between two steps,
and each of them is as short as ever. A short sleep that ends late shows it, as in Gil Tene's jHiccup.
"""

from __future__ import annotations

PULSE_SECONDS = 0.02  # between two looks
LEAST_STALL = (
    0.02  # seconds; shorter ones are of the event loop and of neighbours on a full machine
)


class Stalls:
    def __init__(self) -> None:
        self._looked: float | None = None
        self._worked = 0.0
        self.seconds = 0.0  # so far

    def look(self, now: float, worked: float) -> None:
        """Every PULSE_SECONDS. `worked`: seconds so far in which the model ran, those of the step that runs too."""
        if self._looked is not None:
            late = now - self._looked - PULSE_SECONDS - (worked - self._worked)
            if late >= LEAST_STALL:
                self.seconds += late
        self._looked, self._worked = now, worked
