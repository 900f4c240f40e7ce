"""How much of the time between steps this process gets at all: it may be throttled, stopped or starved of a core.

Pure; used by `steps.py`. The steps do not show it: whoever gets 5 of every 100 ms mostly stands still between two of
them, and each is as short as ever. Short sleeps that end late do show it, as in Gil Tene's jHiccup. Told is a share of
the last seconds, not a sum: what a step costs must not depend on how many there are. Stalls that are shorter than the
sleeps between two looks are not seen.
"""

from __future__ import annotations

PULSE_SECONDS = 0.025  # between two looks while sessions run
LEAST_STALL = 0.02  # seconds; shorter ones are the loop's, or of neighbours on a full machine
LONGEST_STALL = 0.25  # seconds; more at a time is an outage, which shows as silence
HALF_LIFE = 1.0  # seconds, after which a stall counts half
MOST_STRETCH = 100.0


class Stalls:
    def __init__(self) -> None:
        self._looked: float | None = None
        self._worked = 0.0
        self._between = 0.0  # seconds outside steps, each half forgotten after a while ...
        self._stalled = 0.0  # ... and those of them in which it stood still

    def look(self, now: float, worked: float, slept: float) -> None:
        """After a sleep that should have taken `slept` seconds. `worked`: seconds so far in which the model ran, those
        of the step that runs too."""
        if self._looked is not None:
            between = max(0.0, now - self._looked - (worked - self._worked))
            between = min(between, slept + LONGEST_STALL)
            late = between - slept
            # on average it fell asleep in the middle of what it was to sleep
            stalled = late + slept / 2 if late >= LEAST_STALL else 0.0
            kept = 0.5 ** (between / HALF_LIFE)
            self._between = kept * self._between + between
            self._stalled = kept * self._stalled + stalled
        self._looked, self._worked = now, worked

    @property
    def stretch(self) -> float:
        """How many times longer things take here than they would if it never stood still; at least 1."""
        if not self._stalled:
            return 1.0
        alive = max(self._between - self._stalled, self._between / MOST_STRETCH)
        return self._between / alive
