"""The folder of a running swarm's files, by which `status`, `chat` and `generate` find the swarm.

One folder per running swarm, `<runtime>/modelswarm-<uid>/<name>/`: a lock held while its owner runs, start.json,
run.json once it is ready, starts/, members/ and logs/. The lock, not a process id, shows that the owner runs, so a
stale file is never used. The logs of a start that failed are kept in `.failed/<name>/` until the name is used again.
Used by `LocalSwarm` and the command line. Does not know what the processes do.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from modelswarm.errors import ModelSwarmError, UserError

GATEWAY_JOB = "gateway"  # name of the first gateway, of its run file and of its logs
FAILED_FOLDER = ".failed"  # no swarm has such a name
LOCK_TIMEOUT_SECONDS = 0.5  # for another process to finish removing a stale folder


@dataclass(frozen=True, slots=True)
class GatewayAddresses:
    """A gateway of a swarm on this machine. Addresses are `host:port`."""

    name: str
    http: str
    grpc: str
    metrics: str
    admin: str  # gRPC: status, routes, drain


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A swarm that runs on this machine, as run.json describes it. Addresses are `host:port`.

    No pydantic here: its import takes longer than all else that `modelswarm status` does.
    """

    name: str
    model: str  # the served name
    pid: int  # of `modelswarm up`
    http: str  # of the first gateway, as the next three
    grpc: str
    metrics: str
    admin: str
    other_gateways: tuple[GatewayAddresses, ...] = ()

    @property
    def gateways(self) -> tuple[GatewayAddresses, ...]:
        first = GatewayAddresses(GATEWAY_JOB, self.http, self.grpc, self.metrics, self.admin)
        return (first, *self.other_gateways)


@dataclass(frozen=True, slots=True)
class StartInfo:
    """A swarm that starts or runs on this machine, as start.json describes it."""

    name: str
    pid: int  # of `modelswarm up`
    servers: Mapping[str, str]  # name -> blocks, such as 0:4
    gateways: Sequence[str]


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """A ready server or gateway of this machine, as its run file describes it."""

    peer: str
    pid: int
    metrics: str  # `host:port`
    ready_seconds: float  # since it has been ready


class NoSwarmError(ModelSwarmError):
    """No swarm runs on this machine that a command could talk to."""


class SwarmStartingError(NoSwarmError):
    """The swarm is still starting."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the swarm {name!r} is still starting; `modelswarm status` shows what it waits for"
        )


class RunFolder:
    """The folder of one running swarm, claimed until `release`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock
        self.members, self.logs = path / "members", path / "logs"
        self.starts = path / "starts"  # the start file of each server
        self.chat_template = path / "chat_template.jinja"  # only if the document brings one

    @classmethod
    def claim(cls, name: str, parent: Path | None = None) -> RunFolder:
        """Take the name, after removing stale folders. UserError if a swarm of that name runs."""
        parent = parent or runs_folder()
        _remove_stale_folders(parent)
        path = parent / name
        lock = _lock_with_retry(path)
        if lock is None:
            pid = _read_pid(path)
            owner = f" (pid {pid})" if pid else ""
            raise UserError(
                "metadata.name",
                f"a swarm {name!r} runs already{owner}; stop it, or give this one another name with --name",
            )
        folder = cls(path, lock)
        shutil.rmtree(failed_logs(name, parent), ignore_errors=True)
        for part in (folder.members, folder.logs, folder.starts):
            part.mkdir()
        (path / "pid").write_text(str(os.getpid()))
        return folder

    def gateway_file(self, name: str) -> Path:
        """Return the run file of the gateway of that name."""
        return self.path / f"{name}.json"

    def announce(self, start: StartInfo) -> None:
        """Write start.json: from now on `status` and `logs` find the swarm."""
        self._write_record("start.json", asdict(start))

    def publish(self, info: RunInfo) -> None:
        """Write run.json: from now on other commands find the swarm."""
        self._write_record("run.json", asdict(info))

    def _write_record(self, name: str, record: Mapping[str, Any]) -> None:
        written = self.path / f"{name}.new"
        written.write_text(json.dumps(record, indent=1))
        written.replace(self.path / name)

    def keep_logs(self) -> Path:
        """Move the logs to where they survive `release`; return their folder."""
        kept = failed_logs(self.path.name, self.path.parent)
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        return Path(shutil.move(self.logs, kept))

    def release(self) -> None:
        """Remove the folder and release the name. May be called twice."""
        if self._lock >= 0:
            with suppress(FileNotFoundError):  # others clear temporary folders, too
                shutil.rmtree(self.path)
            os.close(self._lock)
            self._lock = -1


def runs_folder() -> Path:
    """Return the folder of all runs, in `$XDG_RUNTIME_DIR` or the temporary folder; only this user may own it."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    path = base / f"modelswarm-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(str(path), f"cannot be created: {error.strerror}") from None
    if path.stat().st_uid != os.getuid() or path.is_symlink():
        raise UserError(
            str(path), "belongs to another user; set XDG_RUNTIME_DIR to a folder of yours"
        )
    return path


def list_runs(parent: Path | None = None) -> list[RunInfo]:
    """Return the published swarms whose owner runs, by name."""
    found = []
    for path in sorted((parent or runs_folder()).iterdir()):
        info = _read_info(path)
        if info is not None and _is_locked(path):
            found.append(info)
    return found


def failed_logs(name: str, parent: Path | None = None) -> Path:
    """Return the folder with the logs of the last start of `name`, if it failed."""
    return (parent or runs_folder()) / FAILED_FOLDER / name


def list_starts(parent: Path | None = None) -> list[StartInfo]:
    """Return the swarms that start or run, and that other commands may find, by name."""
    paths = sorted((parent or runs_folder()).iterdir())
    found = [read_start(path) for path in paths if _is_locked(path)]
    return [start for start in found if start is not None]


def find_starting(name: str | None = None, parent: Path | None = None) -> StartInfo | None:
    """Return the swarm that is still starting, if `find_run` would find none that runs."""
    running = {run.name for run in list_runs(parent)}
    if name in running or (name is None and running):
        return None
    starting = [start for start in list_starts(parent) if name in (None, start.name)]
    if len(starting) > 1:
        names = ", ".join(start.name for start in starting)
        raise UserError("--name", f"several swarms are starting; allowed: one of {names}")
    return starting[0] if starting else None


def find_run(name: str | None = None, parent: Path | None = None) -> RunInfo:
    """Return the swarm of that name, or the only one that runs."""
    runs = list_runs(parent)
    chosen = [run for run in runs if name is None or run.name == name]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(run.name for run in runs)
    starting = find_starting(name, parent)
    if starting is not None:
        raise SwarmStartingError(starting.name)
    if chosen:
        raise UserError("--name", f"several swarms run here; allowed: one of {names}")
    if runs:
        raise UserError("--name", f"no swarm {name!r} runs here; allowed: {names}")
    raise NoSwarmError(
        "no swarm runs on this machine: start one with `modelswarm up FILE`, or give an address with --url"
    )


def server_names(name: str, parent: Path | None = None) -> list[str]:
    """Return the ready servers of a swarm of this machine."""
    members = (parent or runs_folder()) / name / "members"
    return sorted(path.stem for path in members.glob("[!.]*.json"))


def server_processes(name: str, parent: Path | None = None) -> dict[str, LocalProcess]:
    """Return the ready servers of a swarm of this machine, by peer."""
    members = (parent or runs_folder()) / name / "members"
    found = [_read_process(path) for path in members.glob("[!.]*.json")]
    return {process.peer: process for process in found if process is not None}


def gateway_process(
    name: str, gateway: str = GATEWAY_JOB, parent: Path | None = None
) -> LocalProcess | None:
    """Return a gateway of a swarm of this machine; None while it is not ready."""
    return _read_process((parent or runs_folder()) / name / f"{gateway}.json")


def _lock_with_retry(path: Path) -> int | None:
    """As `_try_lock`, but wait for a process that is just removing the stale folder."""
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while (lock := _try_lock(path)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return lock


def _try_lock(path: Path) -> int | None:
    """Return the lock's descriptor, or None if another process holds it. The kernel frees it with the process."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # its owner removed the folder after mkdir
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        if _same_file(lock, path / "lock"):
            return lock
        os.close(lock)  # the locked file is one that its owner has just removed


def _remove_stale_folders(parent: Path) -> None:
    """Remove the folders whose owners ended without removing them."""
    for lock_file in parent.glob("[!.]*/lock"):
        path = lock_file.parent
        lock = _try_lock(path)
        if lock is not None:
            shutil.rmtree(path)
            os.close(lock)


def _same_file(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)


def read_start(path: Path) -> StartInfo | None:
    """Return what start.json of a run's folder says; None if there is none."""
    record = _read_record(path / "start.json")
    servers, gateways = record.get("servers"), record.get("gateways")
    name, pid = record.get("name"), record.get("pid")
    if not (isinstance(servers, dict) and isinstance(gateways, list)):
        return None
    if not (isinstance(name, str) and isinstance(pid, int)):
        return None
    return StartInfo(name, pid, servers, tuple(gateways))


def _read_info(path: Path) -> RunInfo | None:
    record = dict(_read_record(path / "run.json"))
    try:
        others = tuple(GatewayAddresses(**each) for each in record.pop("other_gateways"))
        info = RunInfo(other_gateways=others, **record)
    except (KeyError, TypeError):
        return None  # written by another version
    texts = [info.name, info.model, *(text for each in info.gateways for text in astuple(each))]
    is_complete = isinstance(info.pid, int) and all(isinstance(text, str) for text in texts)
    return info if is_complete else None


def _read_process(path: Path) -> LocalProcess | None:
    record = _read_record(path)
    if not isinstance(record.get("pid"), int):
        return None
    try:
        ready = max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return None
    return LocalProcess(
        str(record.get("peer", "")), record["pid"], str(record.get("metrics", "")), ready
    )


def _read_record(path: Path) -> Mapping[str, Any]:
    """Return the JSON object of a file; empty if there is none."""
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _read_pid(path: Path) -> str:
    try:
        return (path / "pid").read_text()
    except FileNotFoundError:
        return ""
