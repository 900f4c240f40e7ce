"""How much of the time this process gets at all: it may be throttled, stopped or starved of a core.

Pure; used by `steps.py`. The steps do not show it: whoever gets 5 of every 100 ms mostly stands still between two of
them, and each is as short as ever. Short sleeps that end late do show it, as in Gil Tene's jHiccup. Told is a share of
the last seconds, not a sum: what a step costs must not depend on how many there are. A step that was hit by a stall
shows that by itself: its share on top of it would count twice. Stalls that are shorter than the sleeps between two
looks are not seen.
"""

from __future__ import annotations

SAMPLE_SECONDS = 0.025  # between two looks while sessions run
MIN_STALL = 0.02  # seconds; shorter ones are the loop's, or of neighbours on a full machine
MAX_STALL = 0.25  # seconds; more at a time is an outage, which shows as silence
HALF_LIFE = 1.0  # seconds, after which a stall counts half
MAX_SLOWDOWN = 100.0


class StallEstimator:
    def __init__(self) -> None:
        self._last_sample: float | None = None
        self._elapsed = 0.0  # seconds, each half forgotten after a while ...
        self._stalled = 0.0  # ... and those of them in which it stood still
        self._stalled_in_step = 0.0  # seconds for which it stood still in the step that runs
        self._longest_step = 0.0  # seconds; of the steps that have ended since the last look

    def sample(self, now: float, running: float, slept: float) -> None:
        """After a sleep that should have taken `slept` seconds. `running`: so long has a step run; 0: none does."""
        if self._last_sample is not None:
            passed = min(max(0.0, now - self._last_sample), slept + MAX_STALL)
            late = passed - slept
            # on average it fell asleep in the middle of what it was to sleep
            stalled = late + slept / 2 if late >= MIN_STALL else 0.0
            if self._longest_step >= late:
                stalled = 0.0  # it may have been that step that kept the loop from looking
            elif running >= late:
                self._stalled_in_step += stalled
            kept = 0.5 ** (passed / HALF_LIFE)
            self._elapsed = kept * self._elapsed + passed
            self._stalled = kept * self._stalled + stalled
        self._last_sample, self._longest_step = now, 0.0

    def scaled(self, took: float) -> float:
        """A step is over that took so many seconds. Those that it takes here with its share of all stalls: more, if it
        was spared."""
        worked, self._stalled_in_step = max(0.0, took - self._stalled_in_step), 0.0
        self._longest_step = max(self._longest_step, took)
        return max(took, worked * self.slowdown)

    def discard_step(self) -> None:
        """A step is over that is not told, as those of copies are not: the stall that hit it shows nowhere else."""
        self._stalled_in_step = 0.0

    @property
    def slowdown(self) -> float:
        """How many times longer things take here than they would if it never stood still; at least 1."""
        if not self._stalled:
            return 1.0
        alive = max(self._elapsed - self._stalled, self._elapsed / MAX_SLOWDOWN)
        return self._elapsed / alive
