"""What a program does first of all as the first process of a container: it can be asked to stop.

The kernel lets such a process ignore a signal that it has no handler for, and a pod would then only end with its grace
period. Called by the `program` of each process before it imports what takes time. Imports next to nothing.
"""

from __future__ import annotations

import os
import signal


def exit_on_signals() -> None:
    """At once, until the process has its own way to stop: there is nothing to tidy up yet."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_now)


def _exit_now(number: int, frame: object) -> None:
    """Not by an exception: it could come up in a finaliser, which drops it."""
    os._exit(0)
