"""How fast a server steps, as its beats say: seconds per step, by the rows of a step.

Pure; kept by `health.py`, read by `slowness.py` and `deadlines.py`. Knows one server only.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from modelswarm.protocol.messages import Heartbeat

PREFILL_WEIGHT = 0.2  # of the newest beat in the mean of a prompt's rows
MIN_STEPS = 5  # steps of a size before its time is compared, and ...
MIN_HEARTBEATS = 3  # ... beats that told of them: the first steps of a process are slow, and come in one
MAX_SAMPLES = 9  # in the middle of so many: a stall or two of the machine says nothing of a server
MAX_AGE = 60.0  # seconds without such steps, after which their time says nothing
DEFAULT_ROW_SECONDS = 0.05  # seconds per row of a server that has not said
PROGRESS_TIMEOUT = 0.75  # seconds without a step, after which a server that has rows does not move: more than between two beats
MIN_HUNG_SECONDS = 1.0  # seconds, and ...
HUNG_STEPS = 8.0  # times its longest usual step: a step that runs for longer hangs
PREFILL_ROWS = 8  # a step of so many rows and more is one of prefill


@dataclass(slots=True)
class _Samples:
    """Those of one size."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))  # by beat
    count: int = 0
    last_at: float = 0.0  # the last ones
    median: float = 0.0  # the median of `seconds`

    def is_fresh(self, now: float) -> bool:
        """Whether there is enough evidence, and it is not too old."""
        evidence = self.count >= MIN_STEPS and len(self.seconds) >= MIN_HEARTBEATS
        return evidence and now - self.last_at <= MAX_AGE


class StepTimes:
    def __init__(self) -> None:
        self._last: Heartbeat | None = None
        self._by_size: dict[int, _Samples] = {}  # by log2 of their rows
        self._row_seconds: float | None = None  # seconds per row of large steps
        self.longest_step = 0.0  # seconds; of the last steps the longest, as far as it is known
        self.queue_seconds = 0.0  # seconds that the oldest row waits
        self.current_step = 0.0  # seconds that the step which runs has run
        self._stepped_at: float | None = None  # when a beat last told of new steps

    def reset(self) -> None:
        """What was measured counts no longer against it."""
        self._by_size.clear()

    def record_heartbeat(self, heartbeat: Heartbeat, now: float) -> bool:
        """Whether it told how long new steps took."""
        before, self._last = self._last, heartbeat
        self.longest_step = max(heartbeat.step_ms, heartbeat.step_p99_ms) / 1000
        self.queue_seconds = max(0.0, heartbeat.oldest_ready_ms) / 1000
        self.current_step = max(0.0, heartbeat.stepping_ms) / 1000
        if before is None or heartbeat.steps != before.steps:
            self._stepped_at = now
        if before is None:
            return False
        steps, rows = heartbeat.steps - before.steps, heartbeat.rows - before.rows
        busy = (heartbeat.busy_ms - before.busy_ms) / 1000
        if steps <= 0 or rows <= 0 or busy <= 0:
            return False
        size = round(math.log2(max(1.0, rows / steps)))
        seen = self._by_size.setdefault(size, _Samples())
        seen.seconds.append(busy / steps)
        seen.median = median(seen.seconds)
        seen.count += steps
        seen.last_at = now
        if rows / steps >= PREFILL_ROWS:
            row = busy / rows
            self._row_seconds = row if self._row_seconds is None else self._row_seconds + PREFILL_WEIGHT * (row - self._row_seconds)
        return True

    @property
    def rows_run(self) -> int:
        """That it has run so far."""
        return 0 if self._last is None else self._last.rows

    def seconds_since_step(self, now: float) -> float:
        """Seconds since it was last heard of a step."""
        return 0.0 if self._stepped_at is None else now - self._stepped_at

    def idle_seconds(self, now: float) -> float:
        """Seconds for which it has had nothing to do, as far as its beats say."""
        return 0.0 if self.current_step else max(0.0, self.seconds_since_step(now))

    def is_progressing(self, now: float) -> bool:
        """Whether it makes steps: what waits there waits its turn."""
        return self.seconds_since_step(now) < max(PROGRESS_TIMEOUT, 2 * self.longest_step)

    @property
    def is_hung(self) -> bool:
        """Its step runs for much longer than its steps do."""
        return self.current_step > max(MIN_HUNG_SECONDS, HUNG_STEPS * self.longest_step)

    @property
    def prefill_seconds_per_row(self) -> float:
        """Seconds per row of a prompt; generous while unknown."""
        if self._row_seconds is not None:
            return self._row_seconds
        return min(DEFAULT_ROW_SECONDS, self.longest_step) if self.longest_step else DEFAULT_ROW_SECONDS

    def per_block(self, blocks: int, now: float) -> dict[int, float]:
        """Seconds per block of a step, by its size, as far as there is fresh evidence."""
        return {
            size: seen.median / blocks for size, seen in self._by_size.items() if seen.is_fresh(now)
        }

    def fresh_until(self, now: float) -> float:
        """When the first of these will be too old."""
        fresh = (seen.last_at for seen in self._by_size.values() if seen.is_fresh(now))
        return min(fresh, default=math.inf) + MAX_AGE
