"""Signals of commands: Ctrl-C, SIGTERM and a closed terminal stop a swarm once, and let a chat close its session.

Used by `up`, `demo` and `chat`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def run_until_signal(
    stop: Callable[[], None], on_signal: Callable[[], None] | None = None
) -> Iterator[None]:
    """Run the block until a signal, then call `on_signal`; without it KeyboardInterrupt is raised. Main thread only.

    At the end of the block `stop` is called in any case. Signals are ignored then: stopping takes bounded time, and a
    second Ctrl-C must not leave processes running.
    """
    numbers = _without_ignored(_STOP_SIGNALS)
    before = {number: signal.signal(number, _raise_interrupt) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        if on_signal is None:
            raise
        on_signal()
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        stop()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP inside the block, so that cleanup runs. Main thread only."""
    before = {
        number: signal.signal(number, _raise_exit) for number in _without_ignored(_END_SIGNALS)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _without_ignored(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals without a SIGHUP that is ignored: `nohup` lets a command outlive its terminal."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if number != signal.SIGHUP or not is_ignored]


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _raise_exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
