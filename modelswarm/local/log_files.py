"""The logs of a swarm of this machine: where they are, their last lines, and new lines as they are written.

A log is `NAME-INCARNATION.log` in the folder of the run, or among the kept logs of a start that failed. Used by
`modelswarm logs`. Writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modelswarm.errors import UserError
from modelswarm.local.run_folder import (
    FAILED_FOLDER,
    NoSwarmError,
    failed_logs,
    list_starts,
    runs_folder,
)

TAIL_BYTES = 1 << 20  # read from the end of a log for its last lines
_FILE_NAME = re.compile(r"(?P<process>.+)-(?P<incarnation>\d+)\.log")


@dataclass(frozen=True, slots=True)
class LogFolder:
    """The logs of one swarm."""

    swarm: str
    path: Path
    has_ended: bool  # they are left of a run that has ended


@dataclass(frozen=True, slots=True)
class LogFile:
    """The log of one process."""

    process: str
    incarnation: int
    path: Path


@dataclass(frozen=True, slots=True)
class LogLines:
    """Some lines of a log, without line ends."""

    log: LogFile
    lines: Sequence[str]


def find_logs(name: str | None, parent: Path | None = None) -> LogFolder:
    """Return the logs of the swarm of that name, or of the only one that runs, or whose start failed."""
    runs = parent or runs_folder()
    running = [start.name for start in list_starts(runs)]
    if name in running or (name is None and len(running) == 1):
        found = name or running[0]
        return LogFolder(found, runs / found / "logs", has_ended=False)
    if name is None and running:
        raise UserError("NAME", f"several swarms run here; allowed: one of {', '.join(running)}")
    ended = _ended_logs(runs)
    chosen = [swarm for swarm in ended if name in (None, swarm)]
    if len(chosen) == 1:
        return LogFolder(chosen[0], ended[chosen[0]], has_ended=True)
    if chosen:
        raise UserError("NAME", f"several starts failed; allowed: one of {', '.join(chosen)}")
    if running or ended:
        known = ", ".join([*running, *ended])
        raise UserError("NAME", f"there are no logs of a swarm {name!r}; allowed: {known}")
    raise NoSwarmError(
        "no swarm runs on this machine, and no logs of a failed start are kept: start one with `modelswarm up FILE`"
    )


def _ended_logs(runs: Path) -> dict[str, Path]:
    """Return the logs of failed starts, and those in the folders of runs that were killed."""
    failed = runs / FAILED_FOLDER
    names = sorted(path.name for path in failed.iterdir()) if failed.is_dir() else []
    found = {name: failed_logs(name, runs) for name in names}
    killed = sorted(path for path in runs.glob("*/logs") if path.parent.name != FAILED_FOLDER)
    running = {start.name for start in list_starts(runs)}
    return found | {path.parent.name: path for path in killed if path.parent.name not in running}


def list_logs(folder: Path) -> list[LogFile]:
    """Return all logs in a folder, by process and incarnation."""
    found = []
    for path in folder.glob("*.log"):
        match = _FILE_NAME.fullmatch(path.name)
        if match is not None:
            found.append(LogFile(match["process"], int(match["incarnation"]), path))
    return sorted(found, key=lambda log: (log.process, log.incarnation))


def latest_logs(folder: Path) -> list[LogFile]:
    """Return the newest log of each process."""
    return list({log.process: log for log in list_logs(folder)}.values())


class LogReader:
    """Reads the newest log of each process: first its last lines, then what is added to it."""

    def __init__(self, folder: Path, process: str | None = None) -> None:
        """`process`: only this one; None: all."""
        self._folder, self._process = folder, process
        self._offsets: dict[Path, int] = {}

    def read_tails(self, lines: int) -> list[LogLines]:
        """Return the last lines of each log; an empty log too."""
        found = []
        for log in self._logs():
            size = log.path.stat().st_size
            self._offsets[log.path] = max(0, size - TAIL_BYTES)
            tail = self._read_lines(log.path)
            found.append(LogLines(log, tail[max(0, len(tail) - lines) :]))
        return found

    def read_new(self) -> list[LogLines]:
        """Return the whole lines that were added since the last call, of logs that have any."""
        read = [LogLines(log, self._read_lines(log.path)) for log in self._logs()]
        return [part for part in read if part.lines]

    def _logs(self) -> list[LogFile]:
        return [log for log in latest_logs(self._folder) if self._process in (None, log.process)]

    def _read_lines(self, path: Path) -> list[str]:
        offset = self._offsets.get(path, 0)
        try:
            with path.open("rb") as file:
                offset = min(offset, path.stat().st_size)  # it was shortened
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:  # the swarm has just ended
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(whole)
        return whole.decode(errors="replace").splitlines()
