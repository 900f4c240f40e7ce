"""Keeps a set of jobs running: starts them, notices deaths, starts them again after a backoff, stops them.

Used by `LocalSwarm`. A job is a name, a command for each incarnation, and a way to see that it is ready; what the
processes do is not known here. One thread looks every few hundredths of a second; callers of any thread are welcome.
"""

from __future__ import annotations

import enum
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelswarm.errors import ModelSwarmError
from modelswarm.local.backoff import RestartBackoff
from modelswarm.local.child_process import ChildProcess, ParentPipe, describe_exit, read_log_tail, stop_all

POLL_SECONDS = 0.05  # seconds
STOP_GRACE_SECONDS = 6.0  # that a process gets to stop by itself
KEPT_LOGS_PER_JOB = 3  # per job: a job that keeps dying must not fill the disk with files
USER_ERROR_EXIT_CODE = 2  # the exit code of a process whose flags or model are wrong


class JobState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"  # dead; started again when the backoff ends
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    command: Callable[[int, int], Sequence[str]]  # (incarnation, lifeline's fd) -> argv
    is_ready: Callable[[int], bool]  # (pid) -> it serves
    remove_files: Callable[[], None]  # remove what a dead process has left behind
    stop_rank: int = 0  # lower ranks are stopped first


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What is known of a job at one moment."""

    name: str
    state: JobState
    incarnation: int
    pid: int
    restart_in: float = 0.0  # seconds, when waiting
    exit_reason: str = ""  # how the last process ended


@dataclass(frozen=True, slots=True)
class JobChange:
    """A job went into another state; told to the listener on the supervisor's thread."""

    at: float  # time.monotonic
    job: JobStatus
    log_tail: tuple[str, ...] = ()  # the last lines of a process that died


class StartError(ModelSwarmError):
    """A process died, or did not get ready, while the swarm was being started."""

    def __init__(self, message: str, is_user_error: bool = False) -> None:
        super().__init__(message)
        self.is_user_error = is_user_error


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
    ) -> None:
        self._records = {job.name: _JobRecord(job, backoff()) for job in jobs}
        self._env, self._logs, self._listener = env, logs, listener
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._parent_pipe = ParentPipe()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self, timeout: float) -> None:
        """Start every job and wait until all are ready. On failure all is stopped again and StartError raised."""
        self._thread.start()
        try:
            self._wait_all_ready(time.monotonic() + timeout)
        except BaseException:
            self.stop()
            raise

    def job_statuses(self) -> tuple[JobStatus, ...]:
        now = time.monotonic()
        with self._changed:
            return tuple(running.status(now) for running in self._records.values())

    def send_signal(self, name: str, number: signal.Signals) -> JobStatus:
        """Signal a job's process; returns what it was just before. KeyError for a name that is not known."""
        with self._changed:
            running = self._records[name]
            before = running.status(time.monotonic())
            if running.child is not None:
                running.child.send_signal(number)
            return before

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until `condition()` is true, looked at after every change; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def raise_if_failed(self) -> None:
        """Raise what made the watching thread end, if anything did."""
        if self._failure is not None:
            raise self._failure

    def stop(self, grace: float = STOP_GRACE_SECONDS) -> None:
        """Stop everything, rank by rank; nothing runs when it returns. May be called twice."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        for rank in sorted({running.job.stop_rank for running in self._records.values()}):
            stop_all(self._children(rank), grace)
        for running in self._records.values():
            running.state, running.child = JobState.STOPPED, None
            running.job.remove_files()
        self._parent_pipe.close()

    def _children(self, rank: int) -> list[ChildProcess]:
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

    def _check_job(self, running: _JobRecord) -> None:
        now = time.monotonic()
        if running.child is None:
            if now >= running.restart_at:
                self._start_process(running)
            return
        code = running.child.exit_code()
        if code is not None:
            self._on_exit(running, running.child, code, now)
        elif running.state is JobState.STARTING and running.job.is_ready(running.child.pid):
            self._set_state(running, JobState.READY)

    def _start_process(self, running: _JobRecord) -> None:
        incarnation = running.incarnation + 1
        log = self._logs / f"{running.job.name}-{incarnation}.log"
        running.logs.append(log)
        for old in running.logs[:-KEPT_LOGS_PER_JOB]:
            old.unlink(missing_ok=True)
        del running.logs[:-KEPT_LOGS_PER_JOB]
        running.job.remove_files()
        command = running.job.command(incarnation, self._parent_pipe.read_fd)
        child = ChildProcess(command, self._env, log, self._parent_pipe)
        with self._changed:
            running.incarnation, running.child = incarnation, child
        self._set_state(running, JobState.STARTING)

    def _on_exit(self, running: _JobRecord, child: ChildProcess, code: int, now: float) -> None:
        running.job.remove_files()
        with self._changed:
            running.child = None
            running.exit_code, running.exit_reason = code, describe_exit(code)
            running.restart_at = now + running.backoff.next_delay(now - child.started)
        self._set_state(running, JobState.WAITING, tuple(read_log_tail(child.log)))

    def _set_state(self, running: _JobRecord, state: JobState, words: tuple[str, ...] = ()) -> None:
        now = time.monotonic()
        with self._changed:
            running.state = state
            view = running.status(now)
        self._listener(JobChange(now, view, words))  # told before those who wait go on
        with self._changed:
            self._changed.notify_all()

    def _wait_all_ready(self, deadline: float) -> None:
        def settled() -> bool:
            states = [running.state for running in self._records.values()]
            ready = all(state is JobState.READY for state in states)
            return ready or self._failure is not None or self._first_exited() is not None

        self.wait_until(settled, deadline - time.monotonic())
        self.raise_if_failed()
        dead = self._first_exited()
        if dead is not None:
            raise StartError(_describe_start_failure(dead), dead.exit_code == USER_ERROR_EXIT_CODE)
        late = [r.job.name for r in self._records.values() if r.state is not JobState.READY]
        if late:
            raise StartError(f"not ready in time: {', '.join(late)}; see {self._logs}")

    def _first_exited(self) -> _JobRecord | None:
        return next((running for running in self._records.values() if running.exit_reason), None)


def _describe_start_failure(dead: _JobRecord) -> str:
    """A process that knows what is wrong says so in its last line; otherwise its last lines are shown."""
    words = read_log_tail(dead.logs[-1])
    if dead.exit_code == USER_ERROR_EXIT_CODE and words:
        return words[-1]
    shown = "".join(f"\n  {line}" for line in words)
    return (
        f"{dead.job.name} {dead.exit_reason} while starting{'; its last words:' if shown else ''}{shown}"
    )
