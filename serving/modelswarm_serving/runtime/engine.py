"""The engine: one thread that runs the model: steps, and parts of passes between them.

The core runs on the event loop. `node.py` hands a planned step over and gets its results back on the loop. Only one
step runs at a time, so nothing needs a lock. Measured: an empty step there and back costs 20 us (p90 46 us) on two busy
cores, against 90 us for a link one way. So the core stays on the loop, where links are read while a step runs. Knows
tasks and results, no sessions.
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


@dataclass(frozen=True, slots=True)
class StepDone:
    results: Sequence[Result]
    rows: int
    seconds: float
    error: str | None = None  # the whole step failed; no results
    out_of_memory: bool = False  # because its device was full
    lost: DeviceError | None = None  # the device can do no more


@dataclass(frozen=True, slots=True)
class PartDone:
    """A part of a pass was run. `result`: None if more parts follow, else the result, or a failure as text."""

    result: bytes | str | None
    seconds: float


class Engine:
    """Runs steps and parts in order, and calls `done` or `part_done` on the loop after each."""

    def __init__(
        self,
        model: Model,
        done: Callable[[StepDone], None],
        part_done: Callable[[PartDone], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._done, self._part_done = done, part_done
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Sequence[Task] | RunningPass] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, work: Sequence[Task] | RunningPass) -> None:
        """Start a step or the next part of a pass; only after the end of the work before was reported."""
        self._work.put(work)

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

    def _step(self, batch: Sequence[Task]) -> StepDone:
        rows = sum(task.count for task in batch if isinstance(task, BatchItem))
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
        return StepDone(results, rows, time.perf_counter() - began)


def _run_part(running: RunningPass) -> PartDone:
    began = time.perf_counter()
    result: bytes | str | None = None
    try:
        if running.advance():
            result = running.result()
    except Exception as error:  # also a full device: its memory is free once the pass is dropped
        log.exception("a pass failed")
        result = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return PartDone(result, time.perf_counter() - began)
