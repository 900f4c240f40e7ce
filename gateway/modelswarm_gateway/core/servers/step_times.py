"""How fast a server steps, as its beats say: seconds per step, by the rows of a step.

Pure; kept by `health.py`, read by `slowness.py` and `deadlines.py`. Knows one server only.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from modelswarm.protocol.messages import Beat

WEIGHT = 0.2  # of the newest beat in the mean of a prompt's rows
EVIDENCE = 5  # steps of a size before its time is compared, and ...
BEATS = 3  # ... beats that told of them: the first steps of a process are slow, and come in one
KEPT_BEATS = 9  # in the middle of so many: a stall or two of the machine says nothing of a server
STALE = 60.0  # seconds without such steps, after which their time says nothing
UNKNOWN_ROW = 0.05  # seconds per row of a server that has not said
STILL = 0.75  # seconds without a step, after which a server that has rows does not move: more than between two beats
STUCK = 1.0  # seconds, and ...
STUCK_STEPS = 8.0  # times its longest usual step: a step that runs for longer hangs
PREFILL_ROWS = 8  # a step of so many rows and more is one of prefill


@dataclass(slots=True)
class _Steps:
    """Those of one size."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_BEATS))  # by beat
    count: int = 0
    when: float = 0.0  # the last ones
    typical: float = 0.0  # the median of `seconds`

    def fresh(self, now: float) -> bool:
        """Whether there is enough evidence, and it is not too old."""
        evidence = self.count >= EVIDENCE and len(self.seconds) >= BEATS
        return evidence and now - self.when <= STALE


class Pace:
    def __init__(self) -> None:
        self._last: Beat | None = None
        self._sizes: dict[int, _Steps] = {}  # by log2 of their rows
        self._row: float | None = None  # seconds per row of large steps
        self.step = 0.0  # seconds; of the last steps the longest, as far as it is known
        self.queue = 0.0  # seconds that the oldest row waits
        self.stepping = 0.0  # seconds that the step which runs has run
        self._moved: float | None = None  # when a beat last told of new steps

    def restart(self) -> None:
        """What was measured counts no longer against it."""
        self._sizes.clear()

    def beat(self, beat: Beat, now: float) -> bool:
        """Whether it told how long new steps took."""
        before, self._last = self._last, beat
        self.step = max(beat.step_ms, beat.step_p99_ms) / 1000
        self.queue = max(0.0, beat.oldest_ready_ms) / 1000
        self.stepping = max(0.0, beat.stepping_ms) / 1000
        if before is None or beat.steps != before.steps:
            self._moved = now
        if before is None:
            return False
        steps, rows = beat.steps - before.steps, beat.rows - before.rows
        busy = (beat.busy_ms - before.busy_ms) / 1000
        if steps <= 0 or rows <= 0 or busy <= 0:
            return False
        size = round(math.log2(max(1.0, rows / steps)))
        seen = self._sizes.setdefault(size, _Steps())
        seen.seconds.append(busy / steps)
        seen.typical = median(seen.seconds)
        seen.count += steps
        seen.when = now
        if rows / steps >= PREFILL_ROWS:
            row = busy / rows
            self._row = row if self._row is None else self._row + WEIGHT * (row - self._row)
        return True

    @property
    def rows(self) -> int:
        """That it has run so far."""
        return 0 if self._last is None else self._last.rows

    def still(self, now: float) -> float:
        """Seconds since it was last heard of a step."""
        return 0.0 if self._moved is None else now - self._moved

    def idle(self, now: float) -> float:
        """Seconds for which it has had nothing to do, as far as its beats say."""
        return 0.0 if self.stepping else max(0.0, self.still(now))

    def moves(self, now: float) -> bool:
        """Whether it makes steps: what waits there waits its turn."""
        return self.still(now) < max(STILL, 2 * self.step)

    @property
    def stuck(self) -> bool:
        """Its step runs for much longer than its steps do."""
        return self.stepping > max(STUCK, STUCK_STEPS * self.step)

    @property
    def row(self) -> float:
        """Seconds per row of a prompt; generous while unknown."""
        if self._row is not None:
            return self._row
        return min(UNKNOWN_ROW, self.step) if self.step else UNKNOWN_ROW

    def times(self, blocks: int, now: float) -> dict[int, float]:
        """Seconds per block of a step, by its size, as far as there is fresh evidence."""
        return {
            size: seen.typical / blocks for size, seen in self._sizes.items() if seen.fresh(now)
        }

    def times_until(self, now: float) -> float:
        """When the first of these will be too old."""
        fresh = (seen.when for seen in self._sizes.values() if seen.fresh(now))
        return min(fresh, default=math.inf) + STALE
