"""Children are started, watched, restarted and stopped; none outlives its parent, however the parent ends.

Real processes: small stand-ins for servers, which start fast.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
from support.eventually import eventually
from support.processes.server import alive, gone_within

from modelswarm.local.child_process import (
    KEPT_LOG_BYTES,
    MAX_LOG_BYTES,
    Process,
    spawn_process,
)
from modelswarm.local.supervisor import (
    Job,
    JobChange,
    JobState,
    RestartBackoff,
    StartError,
    Supervisor,
)

TESTS = Path(__file__).parents[2]
STAND_IN = TESTS / "support" / "processes" / "stand_in_program.py"
SOON = 60.0  # seconds; generous limit of every wait


def stand_in(folder: Path, name: str, *flags: str, later: Sequence[str] = (), rank: int = 0) -> Job:
    """Return a job. `later`: flags of all incarnations but the first."""
    ready = folder / f"{name}.pid"

    def command(incarnation: int, parent_fd: int) -> Sequence[str]:
        where = ("--parent-fd", str(parent_fd), "--ready", str(ready))
        return (sys.executable, str(STAND_IN), *where, *flags, *(later if incarnation > 1 else ()))

    def is_ready(pid: int) -> bool:
        return ready.exists() and ready.read_text() == str(pid)

    return Job(name, command, is_ready, lambda: ready.unlink(missing_ok=True), rank)


@contextmanager
def supervised(
    folder: Path,
    *jobs: Job,
    listener: Callable[[JobChange], None] = lambda change: None,
    backoff: Callable[[], RestartBackoff] = RestartBackoff,
) -> Iterator[Supervisor]:
    supervisor = Supervisor(jobs, dict(os.environ), folder, listener, backoff)
    supervisor.start(SOON)
    try:
        yield supervisor
    finally:
        supervisor.stop()


def test_jobs_run_after_start_and_none_after_stop(tmp_path: Path) -> None:
    with supervised(tmp_path, stand_in(tmp_path, "a"), stand_in(tmp_path, "b")) as supervisor:
        views = supervisor.job_statuses()
        assert [view.state for view in views] == [JobState.READY, JobState.READY]
        assert all(alive(view.pid) for view in views)

    assert not any(alive(view.pid) for view in views)
    assert not list(tmp_path.glob("*.pid"))


def test_killed_job_restarts_after_backoff_as_new_incarnation(
    tmp_path: Path,
) -> None:
    changes: list[JobChange] = []
    with supervised(tmp_path, stand_in(tmp_path, "a"), listener=changes.append) as supervisor:
        before = supervisor.send_signal("a", signal.SIGKILL)
        again = supervisor.wait_until(
            lambda: (
                supervisor.job_statuses()[0].incarnation == 2
                and supervisor.job_statuses()[0].state is JobState.READY
            ),
            SOON,
        )

        assert again
        assert supervisor.job_statuses()[0].pid != before.pid
    states = [change.job.state for change in changes]
    assert states == [
        JobState.STARTING,
        JobState.READY,
        JobState.WAITING,
        JobState.STARTING,
        JobState.READY,
    ]
    died, started = changes[2], changes[3]
    assert died.job.exit_reason == "killed by SIGKILL"
    assert started.at - died.at > 0.4


@pytest.mark.full
def test_crash_looping_job_leaves_the_others_alone(tmp_path: Path) -> None:
    dying = ("--exit-after", "0.3")  # later only: a start needs both jobs ready at once
    jobs = stand_in(tmp_path, "good"), stand_in(tmp_path, "bad", later=dying)
    with supervised(tmp_path, *jobs, backoff=lambda: RestartBackoff(initial=0.05)) as supervisor:
        good = supervisor.job_statuses()[0]
        supervisor.send_signal("bad", signal.SIGKILL)
        assert supervisor.wait_until(lambda: supervisor.job_statuses()[1].incarnation >= 5, SOON)

        assert supervisor.job_statuses()[0] == good
        assert len(list(tmp_path.glob("bad-*.log"))) <= 3


def test_log_of_a_running_process_is_kept_short(tmp_path: Path) -> None:
    log = tmp_path / "a-1.log"
    log.touch()
    os.truncate(log, MAX_LOG_BYTES + 1)  # no disk is written
    with supervised(tmp_path, stand_in(tmp_path, "a")):
        eventually("a short log", lambda: log.stat().st_size <= KEPT_LOG_BYTES)


def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    supervisor = Supervisor([stand_in(tmp_path, "a", "--deaf")], dict(os.environ), tmp_path)
    supervisor.start(SOON)
    pid = supervisor.job_statuses()[0].pid

    supervisor.stop(grace=0.3)

    assert not alive(pid)


@pytest.mark.full
def test_a_frozen_process_is_killed_too(tmp_path: Path) -> None:
    supervisor = Supervisor([stand_in(tmp_path, "a")], dict(os.environ), tmp_path)
    supervisor.start(SOON)
    pid = supervisor.send_signal("a", signal.SIGSTOP).pid

    supervisor.stop(grace=0.3)

    assert not alive(pid)


def test_lower_ranks_stop_before_higher_ones(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    script = (
        "import os,signal,sys,time\n"
        "def stopped(*_):\n"
        f"    open({str(marks)!r}, 'a').write(sys.argv[1] + ' stopped\\n'); time.sleep(0.3)\n"
        f"    open({str(marks)!r}, 'a').write(sys.argv[1] + ' gone\\n'); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, stopped)\n"
        "open(sys.argv[2], 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )

    def job(name: str, rank: int) -> Job:
        ready = tmp_path / f"{name}.pid"
        command = (sys.executable, "-c", script, name, str(ready))
        return Job(name, lambda *_: command, lambda pid: ready.exists(), lambda: None, rank)

    with supervised(tmp_path, job("server", 1), job("gateway", 0)):
        pass

    assert marks.read_text().split("\n")[:4] == [
        "gateway stopped",
        "gateway gone",
        "server stopped",
        "server gone",
    ]


@pytest.mark.full
def test_start_reports_the_sentence_of_a_process_with_bad_flags(
    tmp_path: Path,
) -> None:
    refusing = (
        "import sys; sys.stderr.write('loading\\n--blocks: 9:12 is out of range\\n'); sys.exit(2)"
    )
    bad = Job("bad", lambda *_: (sys.executable, "-c", refusing), lambda pid: False, lambda: None)
    supervisor = Supervisor([stand_in(tmp_path, "good"), bad], dict(os.environ), tmp_path)

    with pytest.raises(StartError) as caught:
        supervisor.start(SOON)

    assert str(caught.value) == "--blocks: 9:12 is out of range"
    assert caught.value.is_user_error
    assert all(view.state is JobState.STOPPED for view in supervisor.job_statuses())


@pytest.mark.full
def test_start_reports_the_last_log_lines_of_a_crash(tmp_path: Path) -> None:
    crashing = "import os,sys; sys.stderr.write('one\\ntwo\\n'); sys.stderr.flush(); os.kill(os.getpid(), 10)"
    bad = Job("bad", lambda *_: (sys.executable, "-c", crashing), lambda pid: False, lambda: None)

    with pytest.raises(StartError) as caught:
        Supervisor([bad], dict(os.environ), tmp_path).start(SOON)

    assert str(caught.value).startswith("bad killed by SIGUSR1 while starting; its last lines:")
    assert "\n  one\n  two" in str(caught.value)
    assert not caught.value.is_user_error


@pytest.mark.full
def test_process_that_is_never_ready_ends_the_start(tmp_path: Path) -> None:
    job = stand_in(tmp_path, "slow")
    never = Job("slow", job.command, lambda pid: False, job.remove_files)
    supervisor = Supervisor([never], dict(os.environ), tmp_path)

    with pytest.raises(StartError, match=r"no progress for 0\.5 s: slow"):
        supervisor.start(0.5)

    assert all(view.state is JobState.STOPPED for view in supervisor.job_statuses())


@pytest.mark.full
def test_start_with_progress_outlasts_its_timeout(tmp_path: Path) -> None:
    """The job reports a new phase at each look, and is ready after the fourth."""
    job, phases = stand_in(tmp_path, "slow"), itertools.count()
    told: list[int] = []

    def describe(pid: int) -> str:
        told.append(next(phases))
        return f"phase {told[-1]}"

    slow = Job(
        "slow", job.command, lambda pid: len(told) > 3, job.remove_files, describe_start=describe
    )
    supervisor = Supervisor([slow], dict(os.environ), tmp_path)
    supervisor.start(1.0)
    assert [view.state for view in supervisor.job_statuses()] == [JobState.READY]
    supervisor.stop()


PARENT = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from processes.cli.test_supervisor import stand_in
from modelswarm.local.supervisor import Supervisor
folder = Path(sys.argv[1])
jobs = [stand_in(folder, f"child{i}", "--deaf") for i in range(3)]
supervisor = Supervisor(jobs, dict(os.environ), folder)
supervisor.start(60.0)
print(*[status.pid for status in supervisor.job_statuses()], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(n, marks=pytest.mark.full) for n in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_no_child_outlives_a_killed_parent(tmp_path: Path, number: signal.Signals) -> None:
    command = (sys.executable, "-c", PARENT, str(tmp_path), str(TESTS))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(children) == 3
        assert all(alive(pid) for pid in children)

        parent.send_signal(number)

        assert gone_within(children, 60.0)  # a child that still imports notices the end afterwards


def test_job_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    """A machine that has no memory for a process now must not end the other jobs."""
    calls, changes = itertools.count(1), list[JobChange]()

    def spawn(
        command: Sequence[str], env: Mapping[str, str], output: BinaryIO, inherited_fd: int
    ) -> Process:
        if 3 <= next(calls) <= 5:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return spawn_process(command, env, output, inherited_fd)

    jobs = (stand_in(tmp_path, "a"), stand_in(tmp_path, "b"))
    supervisor = Supervisor(
        jobs, dict(os.environ), tmp_path, changes.append, lambda: RestartBackoff(0.1), spawn
    )
    supervisor.start(SOON)
    try:
        other = supervisor.job_statuses()[1]
        supervisor.send_signal("a", signal.SIGKILL)

        def is_back() -> bool:
            supervisor.raise_if_failed()
            job = supervisor.job_statuses()[0]
            return (job.incarnation, job.state) == (5, JobState.READY)

        assert supervisor.wait_until(is_back, SOON)
        assert supervisor.job_statuses()[1] == other
        logs = sorted(path.name for path in tmp_path.glob("a-*.log"))
        assert logs == ["a-1.log", "a-5.log"], "that of the lost process tells its end"
    finally:
        supervisor.stop()
    told = [change.job.exit_reason for change in changes if change.job.incarnation == 2]
    assert told[0] == "could not be started (Cannot allocate memory)"


def test_start_without_room_for_a_process_names_the_cause(tmp_path: Path) -> None:
    def spawn(*_: object) -> Process:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    jobs = (stand_in(tmp_path, "a"),)
    supervisor = Supervisor(jobs, dict(os.environ), tmp_path, spawn=spawn)
    said = r"^a could not be started \(Cannot allocate memory\) while starting"
    with pytest.raises(StartError, match=said):
        supervisor.start(SOON)


FORKING = """
import os, subprocess, sys, time
from modelswarm.local.child_process import ParentPipe
pipe = ParentPipe()
wait = "import os, sys; os.read(int(sys.argv[1]), 1)"
command = (sys.executable, "-c", wait, str(pipe.read_fd))
child = subprocess.Popen(command, pass_fds=(pipe.read_fd,))
if worker := os.fork():
    print(child.pid, worker, flush=True)
time.sleep(300)
"""


def test_worker_of_a_killed_parent_keeps_no_child_alive() -> None:
    """A forked worker, as of multiprocessing, has copies of all descriptors, and may outlive the parent."""
    command = (sys.executable, "-c", FORKING)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, worker = (int(pid) for pid in parent.stdout.readline().split())
        parent.kill()
        try:
            assert gone_within([child], SOON)
        finally:
            os.kill(worker, signal.SIGKILL)
