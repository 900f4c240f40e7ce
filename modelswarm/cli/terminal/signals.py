"""Signals of a command that runs a swarm: Ctrl-C, SIGTERM and a closed terminal all stop it, once.

Used by `up` and `demo`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on each of the signals inside the block. Main thread only."""
    before = {number: signal.signal(number, _raise_interrupt) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore the signals. Stopping takes bounded time, and a second Ctrl-C must not leave processes running."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
