"""Progress lines on stderr: what is being done, and how long it took. stdout is left for what a shell may evaluate.

Used by the parts that build or start something, also by several threads at once. On a terminal the last line always
shows what runs; in a log a line comes every 15 s. Knows nothing of the work itself.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Report = Callable[[str], AbstractContextManager[None]]
TERMINAL_SECONDS = 0.5  # between two lines that replace each other
LOG_SECONDS = 15.0  # between two lines of a log


class _Board:
    """The work that runs now, and a thread that shows it while there is any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, tuple[float, str]] = {}  # what: when it began, details
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, what: str) -> None:
        with self._lock:
            self._running[what] = (time.monotonic(), "")
            if self._thread is None:
                self._thread = threading.Thread(target=self._show, name="progress", daemon=True)
                self._thread.start()

    def set_details(self, what: str, details: str) -> None:
        with self._lock:
            if what in self._running:
                self._running[what] = (self._running[what][0], details)

    def end(self, what: str) -> float:
        """Return how long it took."""
        with self._lock:
            return time.monotonic() - self._running.pop(what)[0]

    def _show(self) -> None:
        terminal = sys.stderr.isatty()
        pause = TERMINAL_SECONDS if terminal else LOG_SECONDS
        while True:
            self._changed.wait(pause)
            with self._lock:
                if not self._running:
                    self._thread = None
                    return
                line = ", ".join(self._lines())
            lead, end = ("\r\033[K", "") if terminal else ("... ", "\n")
            print(f"{lead}{line}", end=end, file=sys.stderr, flush=True)

    def _lines(self) -> list[str]:
        now = time.monotonic()
        return [
            f"{what} ({details + ', ' if details else ''}{now - began:.0f} s)"
            for what, (began, details) in self._running.items()
        ]


_board = _Board()


def tell(line: str) -> None:
    lead = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{lead}{line}", file=sys.stderr, flush=True)


def set_details(what: str, details: str) -> None:
    """Say how far the work has come, while `progress(what)` runs."""
    _board.set_details(what, details)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Print `what: 0.8 s` when the work is done, and progress while it runs."""
    _board.begin(what)
    try:
        yield
    except BaseException:
        tell(f"{what}: failed after {_board.end(what):.1f} s")
        raise
    tell(f"{what}: {_board.end(what):.1f} s")
