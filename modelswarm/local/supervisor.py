"""Keeps a set of jobs running: starts their processes, restarts those that end after a back-off, stops all.

A job is a name, a command for each incarnation, and a readiness check. One thread polls the jobs every
`POLL_SECONDS`; the public methods may be called from any thread. Used by `LocalSwarm`. Does not know what the
processes do.
"""

from __future__ import annotations

import enum
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from modelswarm.errors import ModelSwarmError
from modelswarm.local.child_process import (
    ChildProcess,
    ParentPipe,
    Spawn,
    describe_exit,
    free_bytes,
    read_log_tail,
    shorten_log,
    spawn_process,
    stop_all,
)
from modelswarm.process.command_line import LASTING_EXIT_CODES

POLL_SECONDS = 0.05  # between two checks of the jobs
STOP_GRACE_SECONDS = 6.0  # from SIGTERM to SIGKILL
LOG_ROOM_BYTES = 64 << 10  # with less free, a process cannot write its log or its run file
KEPT_LOGS_PER_JOB = 3  # a job that keeps failing must not fill the disk with files


class JobState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"  # its process has ended; started again when the back-off is over
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Job:
    """One process that is kept running."""

    name: str
    command: Callable[[int, int], Sequence[str]]  # (incarnation, parent pipe's fd) -> argv
    is_ready: Callable[[int], bool]  # (pid) -> the process serves
    remove_files: Callable[[], None]  # removes the files that an ended process has left
    stop_rank: int = 0  # lower ranks are stopped first
    describe_start: Callable[[int], str] = lambda pid: ""  # what the process does while it starts


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job at one moment."""

    name: str
    state: JobState
    incarnation: int
    pid: int
    restart_in: float = 0.0  # seconds, when waiting
    exit_reason: str = ""  # of the last process that ended, such as `killed by SIGKILL`


@dataclass(frozen=True, slots=True)
class JobChange:
    """A job's change of state; given to the listener on the supervisor's thread."""

    at: float  # time.monotonic
    job: JobStatus
    log_tail: tuple[str, ...] = ()  # the last lines of a process that ended


class StartError(ModelSwarmError):
    """A process ended, or made no progress, while the swarm was being started."""

    def __init__(self, message: str, is_user_error: bool = False) -> None:
        super().__init__(message)
        self.is_user_error = is_user_error


@dataclass(slots=True)
class RestartBackoff:
    """Waits before a process that ended is started again: each is twice the one before, up to `maximum`. Pure."""

    initial: float = 0.5  # seconds
    maximum: float = 30.0  # seconds
    reset_after: float = 60.0  # seconds; a run this long resets the wait to `initial`
    _next: float = 0.0

    def next_delay(self, ran: float) -> float:
        """Return the seconds to wait after a run of `ran` seconds."""
        wait = self.initial if ran >= self.reset_after or self._next == 0.0 else self._next
        self._next = min(wait * 2, self.maximum)
        return wait


@dataclass(slots=True)
class _JobRecord:
    job: Job
    backoff: RestartBackoff
    state: JobState = JobState.WAITING
    incarnation: int = 0
    child: ChildProcess | None = None
    restart_at: float = 0.0
    exit_reason: str = ""
    exit_code: int = 0
    logs: list[Path] = field(default_factory=list)

    def status(self, now: float) -> JobStatus:
        wait = max(0.0, self.restart_at - now) if self.state is JobState.WAITING else 0.0
        pid = self.child.pid if self.child else 0
        return JobStatus(self.job.name, self.state, self.incarnation, pid, wait, self.exit_reason)


class Supervisor:
    def __init__(
        self,
        jobs: Sequence[Job],
        env: Mapping[str, str],
        logs: Path,
        listener: Callable[[JobChange], None] = lambda change: None,
        backoff: Callable[[], RestartBackoff] = RestartBackoff,
        spawn: Spawn = spawn_process,
    ) -> None:
        self._records = {job.name: _JobRecord(job, backoff()) for job in jobs}
        self._env, self._logs, self._listener, self._spawn = env, logs, listener, spawn
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._parent_pipe = ParentPipe()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self, timeout: float) -> None:
        """Start every job and wait until all are ready. On failure stop all and raise StartError.

        `timeout`: seconds without progress of any job that is not ready.
        """
        self._thread.start()
        try:
            self._wait_all_ready(timeout)
        except BaseException:
            self.stop()
            raise

    def job_statuses(self) -> tuple[JobStatus, ...]:
        now = time.monotonic()
        with self._changed:
            return tuple(running.status(now) for running in self._records.values())

    def send_signal(self, name: str, number: signal.Signals) -> JobStatus:
        """Send a signal to a job's process; return its status just before. KeyError for an unknown name."""
        with self._changed:
            running = self._records[name]
            before = running.status(time.monotonic())
            if running.child is not None:
                running.child.send_signal(number)
            return before

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until `condition()` is true, evaluated after every change; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def raise_if_failed(self) -> None:
        """Raise the exception that ended the supervisor's thread, if one did."""
        if self._failure is not None:
            raise self._failure

    def stop(self, grace: float = STOP_GRACE_SECONDS) -> None:
        """Stop all processes, rank by rank; none runs when it returns. May be called twice."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        for rank in sorted({running.job.stop_rank for running in self._records.values()}):
            stop_all(self._running_children(rank), grace)
        for running in self._records.values():
            running.state, running.child = JobState.STOPPED, None
            running.job.remove_files()
        self._parent_pipe.close()

    def _running_children(self, rank: int) -> list[ChildProcess]:
        return [
            running.child
            for running in self._records.values()
            if running.child is not None and running.job.stop_rank == rank
        ]

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for running in self._records.values():
                    self._check_job(running)
                self._stopping.wait(POLL_SECONDS)
        except BaseException as error:
            self._failure = error
            with self._changed:
                self._changed.notify_all()

    def _check_job(self, record: _JobRecord) -> None:
        now = time.monotonic()
        if record.child is None:
            if now >= record.restart_at:
                self._start_process(record)
            return
        shorten_log(record.child.log)
        code = record.child.exit_code()
        if code is not None:
            self._on_exit(record, record.child, code, now)
        elif record.state is JobState.STARTING and record.job.is_ready(record.child.pid):
            self._set_state(record, JobState.READY)

    def _start_process(self, record: _JobRecord) -> None:
        incarnation = record.incarnation + 1
        log = self._logs / f"{record.job.name}-{incarnation}.log"
        record.logs.append(log)
        for old in record.logs[:-KEPT_LOGS_PER_JOB]:
            old.unlink(missing_ok=True)
        del record.logs[:-KEPT_LOGS_PER_JOB]
        record.job.remove_files()
        command = record.job.command(incarnation, self._parent_pipe.read_fd)
        try:
            child = ChildProcess(command, self._env, log, self._parent_pipe, self._spawn)
        except OSError as error:  # no memory, process or disk is left; the other jobs go on
            self._on_refused(record, incarnation, error)
            return
        with self._changed:
            record.incarnation, record.child = incarnation, child
        self._set_state(record, JobState.STARTING)

    def _on_refused(self, record: _JobRecord, incarnation: int, error: OSError) -> None:
        """Let a job whose process could not be started wait for its back-off. Logs of its processes are kept."""
        with suppress(OSError):  # a disk that cannot be written
            record.logs.pop().unlink(missing_ok=True)
        with self._changed:
            record.incarnation, record.exit_code = incarnation, 0
            record.exit_reason = f"could not be started ({error.strerror or error})"
            record.restart_at = time.monotonic() + record.backoff.next_delay(0.0)
        self._set_state(record, JobState.WAITING)

    def _on_exit(self, record: _JobRecord, child: ChildProcess, code: int, now: float) -> None:
        record.job.remove_files()
        with self._changed:
            record.child = None
            record.exit_code, record.exit_reason = code, describe_exit(code)
            record.restart_at = now + record.backoff.next_delay(now - child.started)
        self._set_state(record, JobState.WAITING, tuple(read_log_tail(child.log)))

    def _set_state(
        self, record: _JobRecord, state: JobState, log_tail: tuple[str, ...] = ()
    ) -> None:
        now = time.monotonic()
        with self._changed:
            record.state = state
            view = record.status(now)
        self._listener(JobChange(now, view, log_tail))  # before the waiting threads continue
        with self._changed:
            self._changed.notify_all()

    def _wait_all_ready(self, timeout: float) -> None:
        def settled() -> bool:
            states = [record.state for record in self._records.values()]
            ready = all(state is JobState.READY for state in states)
            return ready or self._failure is not None or self._first_exited() is not None

        late, deadline = self._describe_late_jobs(), time.monotonic() + timeout
        while time.monotonic() < deadline and not self.wait_until(settled, min(timeout, 1.0)):
            before, late = late, self._describe_late_jobs()
            if late != before:
                deadline = time.monotonic() + timeout
        self.raise_if_failed()
        record = self._first_exited()
        if record is not None:
            sentence = _describe_start_failure(record, self._logs)
            raise StartError(sentence, record.exit_code in LASTING_EXIT_CODES)
        if late := self._describe_late_jobs():
            raise StartError(f"no progress for {timeout:g} s: {', '.join(late)}; see {self._logs}")

    def _describe_late_jobs(self) -> list[str]:
        return [_describe_late(r) for r in self._records.values() if r.state is not JobState.READY]

    def _first_exited(self) -> _JobRecord | None:
        return next((running for running in self._records.values() if running.exit_reason), None)


def _describe_late(record: _JobRecord) -> str:
    """Return the name of a job that is not ready, and what it does."""
    phase = "" if record.child is None else record.job.describe_start(record.child.pid)
    return f"{record.job.name} ({phase})" if phase else record.job.name


def _describe_start_failure(record: _JobRecord, logs: Path) -> str:
    """Return the last line of a process that reports a user error, else its exit reason and last lines."""
    lines = read_log_tail(record.logs[-1]) if record.logs else []
    if record.exit_code in LASTING_EXIT_CODES and lines:
        return lines[-1]
    cause = describe_full_disk(logs, free_bytes(logs))
    shown = "".join(f"\n  {line}" for line in lines)
    return f"{record.job.name} {record.exit_reason} while starting{cause}{'; its last lines:' if shown else ''}{shown}"


def describe_full_disk(logs: Path, free: int) -> str:
    """Return the cause to add to a failure, if the disk of the logs has too little room to start a process."""
    return f"; the disk of {logs} is full ({free} bytes are free)" if free < LOG_ROOM_BYTES else ""
