"""Signal handlers for the first moments of a process that is process 1 of a container.

The kernel does not deliver a signal without a handler to process 1, so its pod would end only with its grace period.
Called by the `__main__` of each process before the slow imports. Imports only `os` and `signal`.
"""

from __future__ import annotations

import os
import signal


def exit_on_signals() -> None:
    """Exit at once on SIGTERM and SIGINT, until the process installs its own handlers. Nothing needs cleanup yet."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_now)


def _exit_now(number: int, frame: object) -> None:
    """Exit without an exception: one raised inside a finaliser would be dropped."""
    os._exit(0)
