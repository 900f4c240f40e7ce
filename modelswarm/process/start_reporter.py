"""Keeps the progress of this process's own start, and writes it into a start file.

Made by the `app` of a server; the threads of its probe server read it. Weights are read by several threads, so any
thread may report. Knows no phases' order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from modelswarm.process.run_files import write_run_file
from modelswarm.process.start_progress import StartPhase, StartProgress

log = logging.getLogger(__name__)

WRITE_SECONDS = 0.2
"""Shortest time between two writes within one phase; thousands of tensors are read in that time."""


class StartReporter:
    def __init__(
        self, file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`file`: the start file; None: nothing is written."""
        self._file, self._clock = file, clock
        self._lock = threading.Lock()
        self._written_at = 0.0
        self._progress = StartProgress(StartPhase.IMPORTING)
        if file is not None:
            self._write(file)

    @property
    def progress(self) -> StartProgress:
        return self._progress

    def report(self, phase: StartPhase, done: int = 0, total: int = 0, reason: str = "") -> None:
        """Record the progress. The file follows at once at a new phase or its end, else after WRITE_SECONDS."""
        with self._lock:
            before, self._progress = self._progress, StartProgress(phase, done, total, reason)
            is_step = (before.phase, before.reason) == (phase, reason) and done < total
            is_early = self._clock() - self._written_at < WRITE_SECONDS
            if self._file is not None and not (is_step and is_early):
                self._write(self._file)

    def _write(self, file: Path) -> None:
        self._written_at = self._clock()
        try:
            write_run_file(file, self._progress.fields())
        except OSError as error:  # a full disk: the start itself needs none
            log.warning("the start file %s cannot be written: %s", file, error)
            self._file = None
