"""One step of the engine: which work goes out, and what its results do to the hops.

Used by `server.py`. Between `plan` and `finish` the hops of the step are busy: whatever cuts or frees them waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from modelswarm.protocol.messages import Trouble
from modelswarm_serving.core.fencing import Lifecycle
from modelswarm_serving.core.flow import send
from modelswarm_serving.core.flow.flow_control import Windows
from modelswarm_serving.core.hops.hop import Fault, Hop, Phase
from modelswarm_serving.core.hops.outbox import Outbox
from modelswarm_serving.core.hops.replay_log import ReplayLog
from modelswarm_serving.core.kv.transfer import Copies
from modelswarm_serving.core.scheduler import Schedule
from modelswarm_serving.core.stall_estimator import Stalls
from modelswarm_serving.model.base import ModelShape, Pick, Result, Task, Work

MEAN_WEIGHT = 0.1  # of the newest step in the running mean
RECENT_STEPS = 128  # of which the p99 is told


class Steps:
    def __init__(
        self,
        shape: ModelShape,
        life: Lifecycle,
        out: Outbox,
        schedule: Schedule,
        windows: Windows,
        log: ReplayLog,
        copies: Copies,
    ) -> None:
        self._shape = shape
        self._life = life
        self._out = out
        self._schedule = schedule
        self._windows = windows
        self._log = log
        self._copies = copies
        self._running: list[tuple[Hop, Work]] = []
        self._began = 0.0
        self._copied = False  # in the last step
        self.rows = 0
        self.mean_seconds = 0.0
        self.busy_seconds = 0.0  # in steps that ran rows, each with its share of stalls
        self._stalls = Stalls()
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def running_for(self, now: float) -> float:
        """Seconds since the step that is out began; 0 when none is."""
        return max(0.0, now - self._began) if self._tasks else 0.0

    @property
    def _tasks(self) -> int:
        """Of the step that is out, which is one of rows or one of copies."""
        return len(self._running) + self._copies.running

    def pulse(self, now: float, slept: float) -> None:
        self._stalls.look(now, self.running_for(now), slept)

    @property
    def p99_seconds(self) -> float:
        recent = sorted(self._recent)
        return recent[math.ceil(0.99 * len(recent)) - 1] if recent else 0.0

    def plan(self, now: float) -> tuple[Task, ...]:
        if self._tasks:
            return ()
        self._began = now
        rows = self._schedule.waiting > 0
        copies = self._copies.waiting and not (self._copied and rows)  # else it is the turn of rows
        tasks = self._copies.plan(now, self._schedule.decodes) if copies else []
        self._copied = bool(tasks)
        if tasks:
            return tuple(tasks)
        if rows:
            self._running = [(hop, self._work(hop, most)) for hop, most in self._schedule.choose()]
        return tuple(work for _, work in self._running)

    def _work(self, hop: Hop, most: int) -> Work:
        go = hop.go
        assert go is not None
        first = hop.kv
        end = min(hop.ready_end(), first + most)
        hop.busy = True
        pick = None
        if hop.is_tail and end >= go.length and end == len(hop.log):
            pick = Pick(hop.turn.sampling, end, hop.log)
        return Work(
            pages=hop.pages,
            first=first,
            count=end - first,
            blocks=(hop.first, hop.last),
            tokens=hop.log[first:end] if hop.is_head else None,
            rows=None if hop.is_head else hop.inbox.take(end - first),
            emit=self._emits_from(hop, first, end),
            pick=pick,
        )

    def _emits_from(self, hop: Hop, first: int, end: int) -> int:
        """All rows are kept, also those that the successor has (R6)."""
        if hop.is_tail:
            return end
        assert hop.go is not None
        return first if self._log.on else min(max(first, hop.go.send_from), end)

    def finish(self, results: Sequence[Result], now: float) -> None:
        if len(results) != self._tasks:
            wrong = Result(error=f"{len(results)} results for {self._tasks} tasks")
            results = [wrong] * self._tasks
        if self._copies.running:
            self._stalls.uncounted()
            self._end_copies(results, now)
        elif self._running:
            running, self._running = self._running, []
            self._count(now - self._began)
            for (hop, work), result in zip(running, results, strict=True):
                self._retire(hop, work, result, now)

    def _count(self, took: float) -> None:
        """A step of rows; those of copies say nothing of the pace."""
        self._life.steps += 1
        self._recent.append(took)
        self.busy_seconds += self._stalls.stretched(took)
        weight = MEAN_WEIGHT if self.mean_seconds else 1.0
        self.mean_seconds += weight * (took - self.mean_seconds)

    def _end_copies(self, results: Sequence[Result], now: float) -> None:
        for hop in self._copies.finish(results, now):
            hop.busy = False
            if self._let_go(hop, now):
                self._copies.wake(hop)

    def fail(self, error: str, now: float) -> None:
        """The step raised, and one session may be to blame for all: each runs once more, alone (I7)."""
        if self._copies.running or len(self._running) <= 1:  # copies are begun again elsewhere
            self.finish([Result(error=error)] * self._tasks, now)
            return
        running, self._running = self._running, []
        self._stalls.stretched(now - self._began)
        self._life.steps += 1
        for hop, work in running:
            if hop.phase is Phase.RUNNING and not hop.freed:
                hop.busy, hop.alone = False, True
                if work.rows is not None:
                    hop.inbox.put_back(work.rows)
                self.wake(hop, now)
            else:
                self._retire(hop, work, Result(error=error), now)

    def _retire(self, hop: Hop, work: Work, result: Result, now: float) -> None:
        hop.busy = hop.alone = False
        hop.touched = now
        wrong = self._wrong(work, result)
        if wrong is None and not hop.freed:
            # also for an epoch that has ended: the rows were right, a pending cut takes what must go
            hop.kv = work.first + work.count
            self.rows += work.count
            if result.rows is not None:
                self._log.append(hop.handle, work.emit, result.rows)
        if hop.phase is Phase.RUNNING and not hop.freed:
            if wrong is None:
                self._emit(hop, work, result)
                self._copies.advance(hop)
                self.wake(hop, now)
            else:
                self.stop(hop, "", Fault(Trouble.FAILED, wrong))
        self._let_go(hop, now)

    def _let_go(self, hop: Hop, now: float) -> bool:
        """The step no longer holds it: what had to wait for that is done. Whether it is still there."""
        if hop.freed:
            self._life.admission.release(hop)
        elif hop.pending is not None:
            self._life.cut(hop, now)
        return not hop.freed

    def _wrong(self, work: Work, result: Result) -> str | None:
        if result.error is not None:
            return result.error
        wanted = (work.first + work.count - work.emit) * self._shape.row_bytes
        if wanted != (0 if result.rows is None else len(result.rows)):
            return "the model returned another number of rows than it was asked for"
        if work.pick is not None and result.picked is None:
            return "the model picked no token"
        return None

    def _emit(self, hop: Hop, work: Work, result: Result) -> None:
        go = hop.go
        assert go is not None
        first = max(work.emit, go.send_from)  # the successor has the rows before
        if go.successor is not None and result.rows and first < work.first + work.count:
            rows = result.rows
            if first > work.emit:
                rows = memoryview(rows)[(first - work.emit) * self._shape.row_bytes :]
            send.send_rows(self._out, hop, first, rows, self._shape.row_bytes)
        if work.pick is not None and result.picked is not None:
            send.send_picked(self._out, hop, result.picked)
        if not hop.is_head:
            self._windows.grant(hop)

    def wake(self, hop: Hop, now: float) -> None:
        """Something changed that rows of a running hop may have waited for."""
        if hop.phase is not Phase.RUNNING or hop.busy:
            return
        if hop.warm:
            self._copies.wake(hop)
            return
        if hop.is_tail:
            send.send_read(self._out, hop)
        self._schedule.advanced(hop, self._shape.n_blocks)
        if hop.ready_end() > hop.kv:
            self._schedule.ready(hop, now)

    def stop(self, hop: Hop, peer: str, fault: Fault) -> None:
        """Report, and do nothing more in this epoch, not even at Go: only a Fence helps."""
        if hop.phase is not Phase.STOPPED:
            hop.phase = Phase.STOPPED
            self._schedule.stopped(hop)
            self._windows.ended(hop)
            self._out.report(hop, peer, fault)
