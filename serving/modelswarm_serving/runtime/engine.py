"""The engine runs the model: steps, and parts of passes between them, on its thread or on the event loop.

`node.py` submits a planned step and gets its results on the loop. Only one step runs at a time, so nothing needs a
lock. Links are read while the thread runs a step. But two threads with one interpreter lock slow each other down: each
call of torch and each write to a socket waits for it. So a short step of a CPU runs on the loop. Measured with two
groups of four rows on two servers: steps of 4.6 ms instead of 5.2, a tenth more tokens. Knows tasks and results, no
sessions.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from modelswarm.errors import DeviceError
from modelswarm_serving.model.base import BatchItem, Model, OutOfDeviceMemory, Result, Task
from modelswarm_serving.model.passes.contract import RunningPass

log = logging.getLogger(__name__)

SHORT_STEP_SECONDS = 0.01
"""Steps that are expected to take less run on the event loop, which reads no message meanwhile. Heartbeats have a tenth
of a second."""


@dataclass(frozen=True, slots=True)
class StepDone:
    results: Sequence[Result]
    rows: int
    seconds: float
    error: str | None = None  # the whole step failed; no results
    out_of_memory: bool = False  # because its device was full
    lost: DeviceError | None = None  # the device can do no more
    worked: float | None = None  # CPU seconds of a step that ran on the event loop


@dataclass(frozen=True, slots=True)
class PartDone:
    """A part of a pass was run. `result`: None if more parts follow, else the result, or a failure as text."""

    result: bytes | str | None
    seconds: float
    lost: DeviceError | None = None  # the device can do no more


class Engine:
    """Runs steps and parts in order, and calls `done` or `part_done` on the loop after each."""

    def __init__(
        self,
        model: Model,
        done: Callable[[StepDone], None],
        part_done: Callable[[PartDone], None] = lambda _: None,
        short_step_seconds: float = 0.0,
    ) -> None:
        """`short_step_seconds`: steps that are expected to take less run on the event loop."""
        self._model = model
        self._done, self._part_done = done, part_done
        self._short_step_seconds = short_step_seconds
        self._last_rows, self._last_seconds = 0, 0.0  # of the last step of rows; 0 rows: none yet
        if short_step_seconds:
            model.prepare_thread()
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Sequence[Task] | RunningPass] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, work: Sequence[Task] | RunningPass) -> None:
        """Start a step or the next part of a pass; only after the end of the work before was reported.

        A short step is over, and `done` has been called, when this returns.
        """
        if isinstance(work, Sequence) and self.is_short(work):
            self._done(self._step(work, on_loop=True))
        else:
            self._work.put(work)

    def is_short(self, batch: Sequence[Task]) -> bool:
        """Return True if the batch is expected to be short, as the last step of rows was. Steps of KV can take long."""
        rows = count_rows(batch)
        if not self._last_rows or not rows:
            return False
        growth = max(1.0, rows / self._last_rows)
        return self._last_seconds * growth < self._short_step_seconds

    def _run(self) -> None:
        self._model.prepare_thread()
        while True:
            work = self._work.get()
            if isinstance(work, Sequence):
                report = partial(self._done, self._step(work))
            else:
                report = partial(self._part_done, _run_part(work))
            del work  # a pass keeps its rows
            if self._loop.is_closed():
                return  # the process ends, and this step with it
            self._loop.call_soon_threadsafe(report)

    def _step(self, batch: Sequence[Task], *, on_loop: bool = False) -> StepDone:
        rows = count_rows(batch)
        cpu_began = time.thread_time() if on_loop else 0.0
        began = time.perf_counter()
        try:
            results = self._model.step(batch)
        except Exception as error:  # a fault of the model's code must not end the process
            log.exception("a step of %d rows failed", rows)
            return StepDone(
                (),
                rows,
                time.perf_counter() - began,
                f"{type(error).__name__}: {error}",
                isinstance(error, OutOfDeviceMemory),
                error if isinstance(error, DeviceError) else None,
            )
        seconds = time.perf_counter() - began
        if rows:
            self._last_rows, self._last_seconds = rows, seconds
        worked = time.thread_time() - cpu_began if on_loop else None
        return StepDone(results, rows, seconds, worked=worked)


def count_rows(batch: Sequence[Task]) -> int:
    return sum(task.count for task in batch if isinstance(task, BatchItem))


def _run_part(running: RunningPass) -> PartDone:
    began = time.perf_counter()
    result: bytes | str | None = None
    lost: DeviceError | None = None
    try:
        if running.advance():
            result = running.result()
    except Exception as error:  # also a full device: its memory is free once the pass is dropped
        log.exception("a pass failed")
        result = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        lost = error if isinstance(error, DeviceError) else None
    return PartDone(result, time.perf_counter() - began, lost)
