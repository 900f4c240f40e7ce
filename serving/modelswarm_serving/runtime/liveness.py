"""Liveness and readiness of this process: the answers to /live and /ready, and its progress while it starts.

Written by `app.py` and `node.py`, read by the threads of `probe_server.py`; every field is one value, so no lock is
needed. Live: the event loop turns and no step runs for minutes; loading may take any time. Ready: the blocks are loaded
and the server listens for links. Both are local and know no neighbour: one that is down changes neither.
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm.process.start_progress import StartPhase, StartProgress
from modelswarm.process.start_reporter import StartReporter

LOOP_SECONDS = 30.0
"""Seconds without a turn of the event loop after which the process is not live; it turns every 0.1 s."""
STEP_SECONDS = 300.0
"""Seconds of one step after which the process is not live: more than the longest step on the slowest machine."""


class Liveness:
    def __init__(self, clock: Callable[[], float], start: StartReporter | None = None) -> None:
        """`start`: keeps the progress of the start; by default one without a file."""
        self._clock = clock
        self._start = start or StartReporter()
        self._last_loop: float | None = None  # None: the event loop does not run yet
        self._step_started: float | None = None  # start of the running step
        self._is_starting = True
        self._not_serving: str | None = "the model is being loaded"

    def on_loop(self) -> None:
        """Record a turn of the event loop."""
        self._last_loop = self._clock()

    def on_step_started(self) -> None:
        self._step_started = self._clock()

    def on_step_finished(self) -> None:
        self._step_started = None

    def mark_ready(self) -> None:
        self._is_starting, self._not_serving = False, None
        self._start.report(StartPhase.READY)

    def mark_stopping(self) -> None:
        self._is_starting = False
        self._not_serving = "the server is stopping"

    @property
    def start_progress(self) -> StartProgress | None:
        """Progress of the start; None once it is over."""
        return self._start.progress if self._is_starting else None

    @property
    def stall_reason(self) -> str | None:
        """Reason for which the process is not live; None while it is."""
        now, turned, stepping = self._clock(), self._last_loop, self._step_started
        if turned is not None and now - turned > LOOP_SECONDS:
            return f"the event loop has been stalled for {now - turned:.0f} s"
        if stepping is not None and now - stepping > STEP_SECONDS:
            return f"a step has run for {now - stepping:.0f} s"
        return None

    @property
    def unready_reason(self) -> str | None:
        """Reason for which the process is not ready; None while it is."""
        return self._not_serving or self.stall_reason
