"""The step times of one server, from its heartbeats: seconds and bytes read per step, by the rows in a step.

Pure; kept by `health.py`, read by `outlier_detector.py` and `token_deadlines.py`. Knows no other server.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from modelswarm.protocol.messages import FenceAck, Heartbeat

# Weight of the newest heartbeat in the mean time of a prefill row.
PREFILL_WEIGHT = 0.2
# Number of steps of one size before their time is compared.
MIN_STEPS = 5
# Number of heartbeats that must have reported them: the first steps of a process are slow, and come in one heartbeat.
MIN_HEARTBEATS = 3
# Number of heartbeats the median is taken over: one or two stalls of the machine do not change it.
MAX_SAMPLES = 9
# Time in seconds without steps of a size after which their time no longer counts.
MAX_AGE = 60.0
# Time in seconds per prefill row of a server that has not reported any.
DEFAULT_ROW_SECONDS = 0.05
# Time in seconds without a step after which a server with rows makes no progress; longer than between two heartbeats.
PROGRESS_TIMEOUT = 0.75
# Least duration in seconds of a step that counts as hung.
MIN_HUNG_SECONDS = 1.0
# Multiple of the longest usual step above which a step counts as hung.
HUNG_STEPS = 8.0
# Number of rows from which a step counts as prefill.
PREFILL_ROWS = 8


class StepCost(NamedTuple):
    """A step, by block."""

    seconds: float
    read_bytes: float = 0.0  # of weights and KV; 0: unknown


@dataclass(slots=True)
class _Samples:
    """Steps of one size."""

    # By heartbeat: seconds of all blocks and bytes of one, each of a step.
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    reads: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    count: int = 0  # steps
    last_at: float = 0.0
    # The medians of both. They change with a heartbeat, and are read for many servers at once.
    median: float = 0.0
    median_read: float = 0.0

    def is_fresh(self, now: float) -> bool:
        """True if there are enough steps, and they are not too old."""
        evidence = self.count >= MIN_STEPS and len(self.seconds) >= MIN_HEARTBEATS
        return evidence and now - self.last_at <= MAX_AGE


class StepTimes:
    def __init__(self) -> None:
        self._last: Heartbeat | None = None
        self._by_size: dict[int, _Samples] = {}  # by log2 of the rows of a step
        self._row_seconds: float | None = None  # seconds per row of prefill steps
        self.longest_step = 0.0  # seconds; the longest of the last steps, as far as it is known
        self.queue_seconds = 0.0  # waiting time of the oldest row
        self.current_step = 0.0  # seconds; age of the step that runs
        self._stepped_at: float | None = None  # time of the last heartbeat with new steps

    def reset(self) -> None:
        """Forget the measured step times."""
        self._by_size.clear()

    def record_heartbeat(self, heartbeat: Heartbeat, now: float) -> bool:
        """Take the counters of a heartbeat. True if it has the times of new steps."""
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
        samples = self._by_size.setdefault(size, _Samples())
        samples.seconds.append(busy / steps)
        samples.reads.append(max(0.0, heartbeat.read_bytes - before.read_bytes) / steps)
        samples.median, samples.median_read = median(samples.seconds), median(samples.reads)
        samples.count += steps
        samples.last_at = now
        if rows / steps >= PREFILL_ROWS:
            row, known = busy / rows, self._row_seconds
            self._row_seconds = row if known is None else known + PREFILL_WEIGHT * (row - known)
        return True

    def record_fence_ack(self, answer: FenceAck, now: float) -> None:
        """Take the step counter: a step that ran when the Fence came is in no heartbeat yet."""
        if self._last is not None and answer.steps > self._last.steps:
            self._stepped_at = now

    @property
    def rows_run(self) -> int:
        """Rows of all steps so far."""
        return 0 if self._last is None else self._last.rows

    def seconds_since_step(self, now: float) -> float:
        """Seconds since the last heartbeat with a new step."""
        return 0.0 if self._stepped_at is None else now - self._stepped_at

    def idle_seconds(self, now: float) -> float:
        """Seconds without work, as far as heartbeats say."""
        return 0.0 if self.current_step else max(0.0, self.seconds_since_step(now))

    def is_progressing(self, now: float) -> bool:
        """True if the server makes steps, so that waiting rows are only queued."""
        return self.seconds_since_step(now) < max(PROGRESS_TIMEOUT, 2 * self.longest_step)

    @property
    def is_hung(self) -> bool:
        """True if the step that runs has lasted much longer than the server's steps do."""
        return self.current_step > max(MIN_HUNG_SECONDS, HUNG_STEPS * self.longest_step)

    @property
    def prefill_seconds_per_row(self) -> float:
        """Seconds per row of a prompt; a generous default while unknown."""
        if self._row_seconds is not None:
            return self._row_seconds
        return (
            min(DEFAULT_ROW_SECONDS, self.longest_step)
            if self.longest_step
            else DEFAULT_ROW_SECONDS
        )

    def per_block(self, blocks: int, now: float) -> dict[int, StepCost]:
        """Return the cost of a step by its size, for sizes with fresh samples."""
        return {
            size: StepCost(samples.median / blocks, samples.median_read)
            for size, samples in self._by_size.items()
            if samples.is_fresh(now)
        }

    def fresh_until(self, now: float) -> float:
        """Return the time at which the first of these samples will be too old."""
        fresh = (each.last_at for each in self._by_size.values() if each.is_fresh(now))
        return min(fresh, default=math.inf) + MAX_AGE
