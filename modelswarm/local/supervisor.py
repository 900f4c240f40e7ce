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
from modelswarm.local.backoff import Backoff
from modelswarm.local.child_process import Child, Lifeline, how_it_ended, last_words, stop_all

LOOK_EVERY = 0.05  # seconds
STOP_SECONDS = 6.0  # that a process gets to stop by itself
KEPT_LOGS = 3  # per job: a job that keeps dying must not fill the disk with files
USER_FAULT = 2  # the exit code of a process whose flags or model are wrong


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"  # dead; started again when the backoff ends
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    command: Callable[[int, int], Sequence[str]]  # (incarnation, lifeline's fd) -> argv
    ready: Callable[[int], bool]  # (pid) -> it serves
    forget: Callable[[], None]  # remove what a dead process has left behind
    rank: int = 0  # lower ranks are stopped first


@dataclass(frozen=True, slots=True)
class JobView:
    """What is known of a job at one moment."""

    name: str
    state: State
    incarnation: int
    pid: int
    restart_in: float = 0.0  # seconds, when waiting
    ended: str = ""  # how the last process ended


@dataclass(frozen=True, slots=True)
class Change:
    """A job went into another state; told to the listener on the supervisor's thread."""

    at: float  # time.monotonic
    job: JobView
    words: tuple[str, ...] = ()  # the last lines of a process that died


class StartError(ModelSwarmError):
    """A process died, or did not get ready, while the swarm was being started."""

    def __init__(self, message: str, user_fault: bool = False) -> None:
        super().__init__(message)
        self.user_fault = user_fault


@dataclass(slots=True)
class _Running:
    job: Job
    backoff: Backoff
    state: State = State.WAITING
    incarnation: int = 0
    child: Child | None = None
    due: float = 0.0
    ended: str = ""
    code: int = 0
    logs: list[Path] = field(default_factory=list)

    def view(self, now: float) -> JobView:
        wait = max(0.0, self.due - now) if self.state is State.WAITING else 0.0
        pid = self.child.pid if self.child else 0
        return JobView(self.job.name, self.state, self.incarnation, pid, wait, self.ended)


class Supervisor:
    def __init__(
        self,
        jobs: Sequence[Job],
        env: Mapping[str, str],
        logs: Path,
        listener: Callable[[Change], None] = lambda change: None,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._running = {job.name: _Running(job, backoff()) for job in jobs}
        self._env, self._logs, self._listener = env, logs, listener
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._lifeline = Lifeline()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self, timeout: float) -> None:
        """Start every job and wait until all are ready. On failure all is stopped again and StartError raised."""
        self._thread.start()
        try:
            self._wait_all_ready(time.monotonic() + timeout)
        except BaseException:
            self.stop()
            raise

    def views(self) -> tuple[JobView, ...]:
        now = time.monotonic()
        with self._changed:
            return tuple(running.view(now) for running in self._running.values())

    def send(self, name: str, number: signal.Signals) -> JobView:
        """Signal a job's process; returns what it was just before. KeyError for a name that is not known."""
        with self._changed:
            running = self._running[name]
            before = running.view(time.monotonic())
            if running.child is not None:
                running.child.send(number)
            return before

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until `condition()` is true, looked at after every change; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def check(self) -> None:
        """Raise what made the watching thread end, if anything did."""
        if self._failure is not None:
            raise self._failure

    def stop(self, grace: float = STOP_SECONDS) -> None:
        """Stop everything, rank by rank; nothing runs when it returns. May be called twice."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        for rank in sorted({running.job.rank for running in self._running.values()}):
            stop_all(self._children(rank), grace)
        for running in self._running.values():
            running.state, running.child = State.STOPPED, None
            running.job.forget()
        self._lifeline.close()

    def _children(self, rank: int) -> list[Child]:
        return [
            running.child
            for running in self._running.values()
            if running.child is not None and running.job.rank == rank
        ]

    def _watch(self) -> None:
        try:
            while not self._stopping.is_set():
                for running in self._running.values():
                    self._look(running)
                self._stopping.wait(LOOK_EVERY)
        except BaseException as error:
            self._failure = error
            with self._changed:
                self._changed.notify_all()

    def _look(self, running: _Running) -> None:
        now = time.monotonic()
        if running.child is None:
            if now >= running.due:
                self._launch(running)
            return
        code = running.child.exit_code()
        if code is not None:
            self._died(running, running.child, code, now)
        elif running.state is State.STARTING and running.job.ready(running.child.pid):
            self._change(running, State.READY)

    def _launch(self, running: _Running) -> None:
        incarnation = running.incarnation + 1
        log = self._logs / f"{running.job.name}-{incarnation}.log"
        running.logs.append(log)
        for old in running.logs[:-KEPT_LOGS]:
            old.unlink(missing_ok=True)
        del running.logs[:-KEPT_LOGS]
        running.job.forget()
        command = running.job.command(incarnation, self._lifeline.read_fd)
        child = Child(command, self._env, log, self._lifeline)
        with self._changed:
            running.incarnation, running.child = incarnation, child
        self._change(running, State.STARTING)

    def _died(self, running: _Running, child: Child, code: int, now: float) -> None:
        running.job.forget()
        with self._changed:
            running.child = None
            running.code, running.ended = code, how_it_ended(code)
            running.due = now + running.backoff.died(now - child.started)
        self._change(running, State.WAITING, tuple(last_words(child.log)))

    def _change(self, running: _Running, state: State, words: tuple[str, ...] = ()) -> None:
        now = time.monotonic()
        with self._changed:
            running.state = state
            view = running.view(now)
        self._listener(Change(now, view, words))  # told before those who wait go on
        with self._changed:
            self._changed.notify_all()

    def _wait_all_ready(self, deadline: float) -> None:
        def settled() -> bool:
            states = [running.state for running in self._running.values()]
            ready = all(state is State.READY for state in states)
            return ready or self._failure is not None or self._first_dead() is not None

        self.wait_for(settled, deadline - time.monotonic())
        self.check()
        dead = self._first_dead()
        if dead is not None:
            raise StartError(_obituary(dead), dead.code == USER_FAULT)
        late = [r.job.name for r in self._running.values() if r.state is not State.READY]
        if late:
            raise StartError(f"not ready in time: {', '.join(late)}; see {self._logs}")

    def _first_dead(self) -> _Running | None:
        return next((running for running in self._running.values() if running.ended), None)


def _obituary(dead: _Running) -> str:
    """A process that knows what is wrong says so in its last line; otherwise its last lines are shown."""
    words = last_words(dead.logs[-1])
    if dead.code == USER_FAULT and words:
        return words[-1]
    shown = "".join(f"\n  {line}" for line in words)
    return (
        f"{dead.job.name} {dead.ended} while starting{'; its last words:' if shown else ''}{shown}"
    )
