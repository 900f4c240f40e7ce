"""Operator processes that start in 0.3 s instead of 3 s: forked from a process that has imported everything.

Used by `operator_process`. The fork server is this module, run as a program: it reads one JSON line per start, replies
with the pid, and reports every exit code. Its children end with it, and it ends with the test run. Benchmarks and pods
start the operator in the ordinary way.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

START_SECONDS = 60.0


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use, for a child of the fork server."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def set_ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code, negative after a signal."""
        if not self._ended.wait(timeout) or self.returncode is None:
            raise subprocess.TimeoutExpired("modelswarm-operator", timeout)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """One fork server and its children. Any thread may start one."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            (sys.executable, __file__), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        self._started: list[ForkedProcess] = []
        self._running: dict[int, ForkedProcess] = {}
        threading.Thread(target=self._read, name="operator forks", daemon=True).start()

    def start(self, arguments: Sequence[str], log: Path) -> ForkedProcess:
        """Start an operator with these flags; its output is appended to the log."""
        assert self._server.stdin is not None
        with self._starting, self._changed:
            count = len(self._started)
            self._server.stdin.write(json.dumps([str(log), *arguments]) + "\n")
            self._server.stdin.flush()
            if not self._changed.wait_for(lambda: len(self._started) > count, START_SECONDS):
                raise RuntimeError("the fork server of the operator does not answer")
            return self._started[-1]

    def _read(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            pid, code = json.loads(line)
            with self._changed:
                if code is None:
                    self._running[pid] = ForkedProcess(pid)
                    self._started.append(self._running[pid])
                    self._changed.notify_all()
                else:
                    self._running.pop(pid).set_ended(code)


@functools.cache
def fork_server() -> ForkServer:
    """Return the fork server of this test run."""
    return ForkServer()


def _serve() -> None:
    """Fork on each line of stdin; stdout has a line [pid, null] or [pid, exit code]."""
    from modelswarm_operator.app import main  # before the first fork

    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    children: set[int] = set()
    pending = b""
    while True:
        ready, _, _ = select.select((0, woken), (), ())
        if woken in ready:
            os.read(woken, 4096)
        for pid, code in _ended(children):
            children.discard(pid)
            print(json.dumps([pid, code]), flush=True)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                log, *arguments = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _become_operator(main, log, arguments)
                children.add(pid)
                print(json.dumps([pid, None]), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _ended(children: set[int]) -> list[tuple[int, int]]:
    found = []
    for pid in children:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _become_operator(main: object, log: str, arguments: list[str]) -> None:
    """Run in the child; never returns."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        assert callable(main)
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
