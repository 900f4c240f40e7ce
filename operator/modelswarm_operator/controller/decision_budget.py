"""Runs the pure part of a turn in a thread of its own, within a budget of CPU seconds.

Called by `worker` for each decision. The event loop renews the Lease and serves all other swarms meanwhile. A thread
cannot be ended from outside: one that exceeds its budget is left behind, and its result is dropped. All inputs of a
decision are bounded, so it ends at some time. CPU seconds are counted, because a busy node makes any decision slow.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")

DECISION_SECONDS = 10.0  # of CPU; the largest swarm, 4,096 servers, takes 0.5
_LOOK_SECONDS = 0.05  # between two looks at the thread's clock


class DecisionOverrunError(Exception):
    """A decision has used up its CPU seconds."""


async def run_within(work: Callable[[], T], cpu_seconds: float = DECISION_SECONDS) -> T:
    """Run `work` in a thread and return its result. Raises DecisionOverrunError, or the error of `work`."""
    run = _Run(work, asyncio.get_running_loop())
    threading.Thread(target=run, name="decision", daemon=True).start()
    while True:
        await asyncio.wait([run.ended], timeout=_LOOK_SECONDS)
        if run.ended.done():
            return run.ended.result()
        if run.used_seconds() > cpu_seconds:
            raise DecisionOverrunError(f"{cpu_seconds:g} s of CPU time were not enough")


class _Run(Generic[T]):
    """One call in a thread; `ended` gets its result on the event loop."""

    def __init__(self, work: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self._clock: int | None = None
        self.ended: asyncio.Future[T] = loop.create_future()

    def __call__(self) -> None:
        # Taken by the thread itself: only its own id is certain to exist.
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            result = self._work()
        except BaseException as error:
            self._post(partial(self.ended.set_exception, error))
        else:
            self._post(partial(self.ended.set_result, result))

    def _post(self, settle: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)

    def used_seconds(self) -> float:
        """Return 0 before the thread runs and after its end."""
        if self._clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return 0.0
