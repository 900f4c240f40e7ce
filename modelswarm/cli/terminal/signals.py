"""Ctrl-C, SIGTERM and a closed terminal all mean the same to a command that runs a swarm: stop everything, once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Inside, each of them raises KeyboardInterrupt. Main thread only."""
    before = {number: signal.signal(number, _raise_interrupt) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """While everything is being stopped, which takes bounded time, an impatient Ctrl-C must not leave half of it."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
