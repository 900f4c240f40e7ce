"""A forked process behaves like one started by exec: exit code, signals, descriptors, and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.eventually import eventually
from support.processes.forked_process import ForkedProcess, fork_process
from support.processes.server import ENVIRONMENT, command, gone_within

TESTS = Path(__file__).parents[2]
HASH = ("--hash-model", "--pages", "64")
SOON = 60.0  # seconds; generous limit of every wait


@contextmanager
def server(folder: Path, *flags: str, fds: tuple[int, ...] = ()) -> Iterator[ForkedProcess]:
    """Yield a ready hash server."""
    with (folder / "s0.log").open("ab") as log:
        arguments = command(folder, "s0", "0:8", *HASH, *flags)
        process = fork_process(arguments, ENVIRONMENT, log, *fds)
    try:
        eventually("it is ready", (folder / "s0.json").exists)
        yield process
    finally:
        process.kill()
        process.wait(SOON)


def state(pid: int) -> str:
    """Return the state letter of the process: T when it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_exit_code_and_output_are_those_of_the_program(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        arguments = (sys.executable, "-m", "modelswarm_gateway", "--what")
        process = fork_process(arguments, ENVIRONMENT, log)
    assert process.wait(SOON) == 2
    [sentence] = (tmp_path / "log").read_text().splitlines()
    assert sentence.startswith("modelswarm-gateway: ") and "--what" in sentence


def test_signals_stop_and_kill_a_forked_process(tmp_path: Path) -> None:
    with server(tmp_path) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        os.kill(process.pid, signal.SIGSTOP)
        eventually("it is stopped", lambda: state(process.pid) == "T")
        process.send_signal(signal.SIGCONT)
        eventually("it goes on", lambda: state(process.pid) != "T")
        process.terminate()
        assert process.wait(SOON) == 0
    with server(tmp_path) as process:
        process.kill()
        assert process.wait(SOON) == -signal.SIGKILL
        assert process.returncode == process.poll() == -signal.SIGKILL


def test_every_waiting_thread_gets_the_exit_code(tmp_path: Path) -> None:
    codes: list[int] = []
    with server(tmp_path) as process:
        threads = [
            threading.Thread(target=lambda: codes.append(process.wait(SOON))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        process.kill()
        for thread in threads:
            thread.join(SOON)
    assert codes == [-signal.SIGKILL] * 4


def test_only_named_descriptors_are_inherited(tmp_path: Path) -> None:
    parent_fd, held = os.pipe()
    with server(tmp_path, "--parent-fd", str(parent_fd), fds=(parent_fd,)) as process:
        links = [path.readlink() for path in Path(f"/proc/{process.pid}/fd").iterdir()]
        pipe = Path(f"/proc/self/fd/{parent_fd}").readlink()
        assert links.count(pipe) == 1
        assert os.getpgid(process.pid) == process.pid
        os.close(parent_fd)
        os.close(held)
        assert process.wait(SOON) == 1


def test_variable_that_is_read_at_import_is_refused(tmp_path: Path) -> None:
    arguments = command(tmp_path, "s0", "0:8", *HASH)
    with pytest.raises(ValueError, match="HF_HOME=/x is read at import"):
        fork_process(arguments, {**ENVIRONMENT, "HF_HOME": "/x"}, 2)


PARENT = """
import signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from processes.server.test_forked_process import server
from support.processes import forked_process
with server(Path(sys.argv[1])) as process:
    print(process.pid, forked_process._fork_server(False)._process.pid, flush=True)
    print(process.wait(60), flush=True)
"""


@pytest.mark.parametrize("killed", ["parent", pytest.param("fork server", marks=pytest.mark.full)])
def test_no_fork_outlives_what_started_it(tmp_path: Path, killed: str) -> None:
    arguments = (sys.executable, "-c", PARENT, str(tmp_path), str(TESTS))
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, fork_server = map(int, parent.stdout.readline().split())
        if killed == "parent":
            parent.kill()
        else:
            os.kill(fork_server, signal.SIGKILL)
            assert int(parent.stdout.readline()) == -signal.SIGKILL
            parent.kill()
    assert gone_within([child, fork_server], SOON)
