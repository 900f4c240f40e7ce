"""Child processes that end with this process: started, signalled and stopped, with their output in a log file.

Every child inherits the read end of one pipe (`--parent-fd`) whose write end only this process has. However this
process ends, the kernel closes the write end; the children read end-of-file and exit. Works on Linux and macOS.
Used by the supervisor. Does not know servers, gateways or restarts.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

LOG_TAIL_BYTES = 8192  # read from the end of a log
MAX_LOG_BYTES = 64 << 20  # of a log, which may be in memory, as all of $XDG_RUNTIME_DIR
KEPT_LOG_BYTES = 1 << 20  # its end, when it has grown longer
KILL_WAIT_SECONDS = 10.0  # for a process to end after SIGKILL


class ParentPipe:
    """The pipe. Only its read end is inherited, and only by the children it is passed to."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # both close on exec (PEP 446)
        _pipes.add(self)

    def close(self) -> None:
        """Make all children exit by closing the pipe. May be called twice."""
        if self._write_fd >= 0:
            os.close(self._write_fd)
            os.close(self.read_fd)
            self._write_fd = -1


_pipes: weakref.WeakSet[ParentPipe] = weakref.WeakSet()


def _close_pipes() -> None:
    """Close the pipes in the child of a fork: a worker, as of multiprocessing, may outlive their owner."""
    for pipe in tuple(_pipes):
        pipe.close()


os.register_at_fork(after_in_child=_close_pipes)


class Process(Protocol):
    """The part of `subprocess.Popen` that a supervisor needs."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


# Starts a process from its command, environment, log and the inherited end of the parent pipe.
Spawn = Callable[[Sequence[str], Mapping[str, str], BinaryIO, int], Process]


def spawn_process(
    command: Sequence[str], env: Mapping[str, str], output: BinaryIO, inherited_fd: int
) -> Process:
    """Start a process by exec, in its own process group. stdout and stderr are `output`."""
    return subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(inherited_fd,),
        process_group=0,
    )


class ChildProcess:
    """One running process, in its own process group: Ctrl-C reaches only this process, which stops the children."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        parent_pipe: ParentPipe,
        spawn: Spawn,
    ) -> None:
        with log.open("ab") as output:
            self._process = spawn(command, env, output, parent_pipe.read_fd)
        self.log = log
        self.started = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return None while it runs, -9 if signal 9 killed it. Reaps the process."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        self._process.send_signal(number)

    def wait(self, deadline: float) -> bool:
        """Return True once the process has ended; False at the deadline (time.monotonic)."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True


def stop_all(children: Sequence[ChildProcess], grace: float) -> None:
    """Send SIGTERM to all, and SIGKILL to those that run after `grace` seconds. Returns when all are reaped."""
    for child in children:
        child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    for child in children:
        if not child.wait(deadline):
            child.send_signal(signal.SIGKILL)
            child.wait(time.monotonic() + KILL_WAIT_SECONDS)


def describe_exit(code: int) -> str:
    """Return `exited with code 1` or `killed by SIGKILL`; `code` as from `exit_code`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the folder's disk."""
    return shutil.disk_usage(folder).free


def shorten_log(log: Path, most: int = MAX_LOG_BYTES, kept: int = KEPT_LOG_BYTES) -> None:
    """Keep only the end of a log that has more than `most` bytes. Its process appends, and goes on behind that."""
    with suppress(OSError):  # removed meanwhile; a full disk
        if log.stat().st_size <= most:
            return
        with log.open("r+b") as file:
            file.seek(-kept, os.SEEK_END)
            end = file.read().partition(b"\n")[2]  # whole lines
            file.seek(0)
            file.write(end)
            file.truncate()


def read_log_tail(log: Path, lines: int = 10) -> list[str]:
    """Return the last non-empty lines of a log; none if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]
