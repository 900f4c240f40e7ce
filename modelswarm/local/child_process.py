"""Child processes that cannot outlive us: started, watched, stopped; their words kept in a log file.

Every child inherits the read end of one pipe (`--parent-fd`) whose write end only this process has. However we die,
the kernel closes the write end, the children read end-of-file and exit. Works on Linux and macOS alike.
Used by the supervisor. Knows nothing of servers, gateways or restarts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LOG_TAIL_BYTES = 8192


class ParentPipe:
    """The pipe. Neither end is inherited except the read end by those it is passed to."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # both close on exec (PEP 446)

    def close(self) -> None:
        """Tell all children to exit, and give the pipe back. May be called twice."""
        if self._write_fd >= 0:
            os.close(self._write_fd)
            os.close(self.read_fd)
            self._write_fd = -1


class ChildProcess:
    """One running process. It gets its own process group, so that Ctrl-C reaches only us and we choose the order."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, parent_pipe: ParentPipe
    ) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(parent_pipe.read_fd,),
                process_group=0,
            )
        self.log = log
        self.started = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; -9 when it was killed by signal 9. Reaps it."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Signal it, unless it is dead."""
        self._process.send_signal(number)

    def wait(self, deadline: float) -> bool:
        """True once it is dead; False at the deadline (of time.monotonic)."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True


def stop_all(children: Sequence[ChildProcess], grace: float) -> None:
    """SIGTERM to all, SIGKILL to those that still live after `grace` seconds. All are reaped when it returns."""
    for child in children:
        child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    for child in children:
        if not child.wait(deadline):
            child.send_signal(signal.SIGKILL)
            child.wait(time.monotonic() + 10.0)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def read_log_tail(log: Path, lines: int = 10) -> list[str]:
    """The last lines that a process wrote."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]
