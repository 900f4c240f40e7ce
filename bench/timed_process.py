"""A child process that a benchmark controls over its standard streams, so that both sides can take turns.

It reads a line per task and writes a line with the seconds of each.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Self


class TimedProcess:
    """Runs a module: `with TimedProcess(module, *words) as child: child.time_task(line)`."""

    def __init__(self, module: str, *words: str) -> None:
        command = [sys.executable, "-m", module, *words]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def time_task(self, line: str) -> float:
        """Return the seconds of a task, as the process measured them."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()
        return float(self._child.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._child.kill()
        self._child.communicate()
