"""How long this machine stood still: a thread that sleeps a moment, again and again, and sees how late it wakes.

Used by tests that bound a pause which readers see. A machine that is too busy, or stopped, makes the same pause
everywhere, and says nothing of the swarm.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

BEAT_SECONDS = 0.01


class Pulse:
    """Use as a context manager."""

    def __init__(self) -> None:
        self.longest = 0.0  # seconds that it was late, at worst
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        before = time.perf_counter()
        while not self._over.wait(BEAT_SECONDS):
            now = time.perf_counter()
            self.longest = max(self.longest, now - before - BEAT_SECONDS)
            before = now
