"""Estimates the share of time in which this process is stalled: throttled, stopped or starved of a core.

Pure; used by `step.py`. Step times do not show throttling: a process that runs 5 of every 100 ms is paused mostly
between steps, so each step looks short. Short sleeps that end late do show it, as in Gil Tene's jHiccup.
The estimate is a share of the last seconds, not a sum. So the cost of a step does not depend on the number of
steps. A step that was hit by a stall is longer by itself; adding its share would count the stall twice. Stalls shorter
than the sleep between two samples are not seen. Knows no clock of its own.
"""

from __future__ import annotations

SAMPLE_SECONDS = 0.025
"""Seconds between two samples while sessions run."""
MIN_STALL = 0.02
"""Seconds; shorter delays come from the event loop, or from other processes of a full machine."""
MAX_STALL = 0.25
"""Seconds counted per sample; a longer stall is an outage, which shows as silence."""
HALF_LIFE = 1.0
"""Seconds after which a stall counts half."""
MAX_SLOWDOWN = 100.0
"""Upper limit of `slowdown`, a ratio."""


class StallEstimator:
    def __init__(self) -> None:
        self._last_sample: float | None = None
        self._elapsed = 0.0  # seconds, decaying with HALF_LIFE
        self._stalled = 0.0  # stalled seconds of those, decaying too
        self._stalled_in_step = 0.0  # stalled seconds in the running step
        self._longest_step = 0.0  # seconds; of the steps that ended since the last sample

    def sample(self, now: float, running: float, slept: float) -> None:
        """Take a sample after a sleep meant to last `slept` seconds; `running`: seconds of the running step, or 0."""
        if self._last_sample is not None:
            elapsed = min(max(0.0, now - self._last_sample), slept + MAX_STALL)
            late = elapsed - slept
            # on average the stall began in the middle of the sleep
            stalled = late + slept / 2 if late >= MIN_STALL else 0.0
            if self._longest_step >= late:
                stalled = 0.0  # perhaps that step kept the event loop from sampling
            elif running >= late:
                self._stalled_in_step += stalled
            decay = 0.5 ** (elapsed / HALF_LIFE)
            self._elapsed = decay * self._elapsed + elapsed
            self._stalled = decay * self._stalled + stalled
        self._last_sample, self._longest_step = now, 0.0

    def scaled(self, took: float, worked: float | None = None) -> float:
        """Return the seconds of a finished step with its share of all stalls; at least `took`.

        `worked`: CPU seconds of a step on the event loop. No sample can be taken during it, and it is short. So a late
        sample after it shows a stall, and so does a long step.
        """
        if worked is None:
            worked = max(0.0, took - self._stalled_in_step)
            self._longest_step = max(self._longest_step, took)
        elif took < MIN_STALL:
            worked = took
        self._stalled_in_step = 0.0
        return max(took, worked * self.slowdown)

    def discard_step(self) -> None:
        """A step ended that is not reported (KV transfers): the stall that hit it must not count for the next one."""
        self._stalled_in_step = 0.0

    @property
    def slowdown(self) -> float:
        """Ratio of elapsed time to running time, at least 1."""
        if not self._stalled:
            return 1.0
        alive = max(self._elapsed - self._stalled, self._elapsed / MAX_SLOWDOWN)
        return self._elapsed / alive
