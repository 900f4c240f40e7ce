"""Processes of one cluster, known by stored pids, so that another run can pause or end exactly these.

A pid is stored with the process's start time: a number that the kernel has given to another process is never touched.
Used by every part that starts a program. Knows nothing of what the programs do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.devcluster.layout import Layout
from tools.devcluster.waiting import wait_for

KILLED_SECONDS = 60.0  # until the kernel has removed a process after SIGKILL


class DiedAtStart(RuntimeError):
    """A program ended while it started; the message has the end of its log."""


class Processes:
    """Starts, signals and forgets processes by name."""

    def __init__(self, layout: Layout, *, ends_with_owner: bool = False) -> None:
        """`ends_with_owner`: the kernel kills what is started when this process ends, however it ends."""
        self._layout = layout
        self._tie = ["setpriv", "--pdeathsig", "KILL"] if ends_with_owner else []
        self._mine: dict[str, subprocess.Popen[bytes]] = {}  # children of this process

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        inside: int | None = None,
    ) -> int:
        """Start a program, in the network and mount namespaces of the process `inside` if given. Return the pid."""
        enter = [] if inside is None else ["nsenter", f"--target={inside}", "--net", "--mount"]
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [*self._tie, *enter, *(str(word) for word in command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self._mine[name] = process
        record = {"pid": process.pid, "started": start_ticks(process.pid)}
        self._file(name).write_text(json.dumps(record))
        return process.pid

    def log(self, name: str) -> Path:
        return self._layout.logs / f"{name}.log"

    def log_end(self, name: str, lines: int = 15) -> str:
        log = self.log(name)
        text = log.read_text(errors="replace") if log.exists() else ""
        return "\n".join([f"--- end of {log}", *text.splitlines()[-lines:]])

    def names(self) -> list[str]:
        """Return the names in the order in which the processes were started."""
        files = sorted(self._layout.pids.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        return [file.stem for file in files]

    def pid(self, name: str) -> int | None:
        """Return the pid of a running process, or None."""
        file = self._file(name)
        if not file.exists():
            return None
        record = json.loads(file.read_text())
        pid = int(record["pid"])
        return pid if start_ticks(pid) == record["started"] is not None else None

    def check_running(self, name: str) -> None:
        if self.pid(name) is None:
            raise DiedAtStart(f"{name} ended while it started\n{self.log_end(name)}")

    def send(self, name: str, number: signal.Signals) -> None:
        pid = self.pid(name)
        if pid is None:
            raise ProcessLookupError(f"{name} is not running")
        os.kill(pid, number)

    def pause(self, name: str) -> None:
        self.send(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.send(name, signal.SIGCONT)

    def kill(self, name: str) -> None:
        """Send SIGKILL and wait for the end. A process that has ended is no error."""
        pid = self.pid(name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            wait_for(
                f"{name} to be killed", lambda: self._gone(name, pid), KILLED_SECONDS, every=0.02
            )
        self._forget(name)

    def stop(self, name: str, seconds: float) -> None:
        """Send SIGTERM; kill the process if it still runs after `seconds`."""
        pid = self.pid(name)
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # it may be paused
            deadline = time.monotonic() + seconds
            while not self._gone(name, pid) and time.monotonic() < deadline:
                time.sleep(0.02)
        self.kill(name)

    def _gone(self, name: str, pid: int) -> bool:
        if name in self._mine:
            self._mine[name].poll()
        return start_ticks(pid) is None

    def _forget(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)
        process = self._mine.pop(name, None)
        if process is not None:
            process.wait(KILLED_SECONDS)

    def _file(self, name: str) -> Path:
        return self._layout.pids / f"{name}.json"


def start_ticks(pid: int) -> int | None:
    """Return when a running process was started, in the kernel's ticks since boot. None: ended, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def command_lines() -> list[tuple[int, list[str]]]:
    """Return pid and command line of every process of this machine."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "cmdline").read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            found.append((int(folder.name), text.split("\0")))
    return found
