"""Progress of a start: phases and a bar on a terminal, causes of missing readiness, logs of a failed start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from support.eventually import eventually
from support.models.tiny_models import make_model
from support.processes.forked_process import fork_process
from support.processes.programs.terminal import Terminal
from support.processes.swarm import HASH, plan, write_document

from modelswarm.local.child_process import Process, spawn_process
from modelswarm.local.run_folder import find_starting
from modelswarm.local.supervisor import StartError
from modelswarm.local.swarm import LocalSwarm
from modelswarm.process.start_progress import StartPhase, read_start_file

START_SECONDS = 300.0  # seconds: a torch server on a busy machine
ANY_PORTS = tuple(
    part for flag in ("--http", "--grpc", "--metrics", "--admin") for part in (flag, "127.0.0.1:0")
)
PUBLISHED = replace(HASH, publish=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "llama")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the runtime folder of this test's swarms."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir()
    return tmp_path / "runtime" / f"modelswarm-{os.getuid()}"


def output_of(*arguments: str) -> str:
    """Return the output of a command."""
    command = (sys.executable, "-m", "modelswarm.cli", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_terminal_shows_phases_and_a_bar(folder: Path, tmp_path: Path, runtime: Path) -> None:
    """The server is stopped while it imports torch. Then its start file reports a server that reads weights."""
    document = write_document(tmp_path / "swarm.yaml", folder, spans={"count": 1})
    start_file = runtime / "tiny" / "starts" / "tiny-s0-r0.json"
    environment = {"XDG_RUNTIME_DIR": str(runtime.parent)}
    with Terminal(("up", str(document), *ANY_PORTS), environment, width=100) as terminal:
        found = eventually("it imports", lambda: read_start_file(start_file), START_SECONDS)
        assert found.progress.phase == StartPhase.IMPORTING
        os.kill(found.pid, signal.SIGSTOP)
        terminal.wait_for("tiny is starting")
        terminal.wait_for("importing")
        terminal.wait_for(f"logs: {runtime / 'tiny' / 'logs'}")
        reading = {"phase": "reading weights", "done": 50, "total": 100, "reason": ""}
        start_file.write_text(json.dumps({**reading, "pid": found.pid}))
        terminal.wait_for("reading weights [######......] 50 %")
        assert "reading weights [######......] 50 %" in output_of("status")
        os.kill(found.pid, signal.SIGCONT)
        eventually("it is ready", lambda: "ready: tiny at" in terminal.text, START_SECONDS)
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.wait_end() == 0


def test_lines_tell_each_phase_without_a_terminal(folder: Path, tmp_path: Path) -> None:
    document = write_document(tmp_path / "swarm.yaml", folder, spans={"count": 1})
    command = (sys.executable, "-m", "modelswarm.cli", "up", str(document), "--hash-model")
    (folder / "chat_template.jinja").write_text("hello\n{% for m in %}\n")
    with subprocess.Popen(
        (*command, *ANY_PORTS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not (lines and lines[-1].startswith("in another terminal")):
            line = process.stdout.readline()
            assert line, "".join(lines)
            lines.append(line)
        status = output_of("status")
        logs = output_of("logs", "--process", "gateway")
        process.send_signal(signal.SIGINT)
        process.stdout.read()

    text = "".join(lines)
    template = folder / "chat_template.jinja"
    assert f"warning: {template}: the chat template does not compile: line 2: " in text
    assert "gateway: importing" in text
    assert "tiny: ready" in status
    assert (
        "chats are refused: chat_template.jinja: the chat template does not compile: line 2: "
        in status
    )
    assert "== gateway (gateway-1.log)" in logs
    assert " serves http at " in logs


def test_unusable_tokenizer_is_said_until_it_is_mended(folder: Path) -> None:
    """The plan is made before the damage, because it would refuse the folder."""
    planned = plan(folder, spans=1, replicas=1)
    settings, whole = folder / "tokenizer_config.json", '{"model_max_length": 512}'
    settings.write_text('{"a": 1,\n"b": }')
    swarm = LocalSwarm(planned, PUBLISHED, spawn=fork_process)
    starting = threading.Thread(target=swarm.start)
    starting.start()
    try:
        cause = "tokenizer_config.json: not valid JSON: Expecting value: line 2 column 6"
        eventually("it starts", find_starting)
        eventually(
            "the reason is said",
            lambda: cause in output_of("status"),
            explain=lambda: output_of("status"),
        )
        gateway = json.loads(output_of("status", "--json"))["starting"][-1]
        assert (gateway["process"], gateway["phase"]) == ("gateway", "tokenizer")
        assert cause in gateway["reason"]
        settings.write_text(whole)
        starting.join(300.0)
        assert not starting.is_alive()
        assert find_starting() is None
        assert "tiny: ready" in output_of("status")
    finally:
        settings.write_text(whole)
        starting.join(300.0)
        swarm.stop()


def failing_server(
    command: Sequence[str], env: Mapping[str, str], output: BinaryIO, inherited_fd: int
) -> Process:
    """Start the gateway unchanged, and in place of a server a program that fails at once."""
    if "modelswarm_serving" in command:
        command = (sys.executable, "-c", "import sys; print('no disk'); sys.exit(1)")
    return spawn_process(command, env, output, inherited_fd)


def test_logs_of_a_failed_start_are_kept_and_shown(folder: Path, runtime: Path) -> None:
    planned = plan(folder, spans=1, replicas=1)
    with pytest.raises(StartError, match="exited with code 1 while starting") as caught:
        LocalSwarm(planned, PUBLISHED, spawn=failing_server).start()

    kept = runtime / ".failed" / "tiny"
    assert f"all logs are kept in {kept}" in str(caught.value)
    shown = output_of("logs", "tiny")
    assert f"logs of tiny: {kept}" in shown
    assert "== tiny-s0-r0 (tiny-s0-r0-1.log)\nno disk" in shown


def sleeping_server(
    command: Sequence[str], env: Mapping[str, str], output: BinaryIO, inherited_fd: int
) -> Process:
    """Start the gateway unchanged, and in place of a server a program that reports nothing."""
    if "modelswarm_serving" in command:
        command = (sys.executable, "-c", "import time; time.sleep(600)")
    return spawn_process(command, env, output, inherited_fd)


def test_start_that_takes_too_long_names_the_phase(folder: Path) -> None:
    settings = replace(HASH, start_timeout=1.0)
    with pytest.raises(StartError, match=r"no progress for 1 s: .*tiny-s0-r0 \(importing\)"):
        LocalSwarm(plan(folder, spans=1, replicas=1), settings, spawn=sleeping_server).start()


def test_library_leaves_no_logs_of_a_failed_start(folder: Path, runtime: Path) -> None:
    planned = plan(folder, spans=1, replicas=1)
    with pytest.raises(StartError, match="exited with code 1 while starting"):
        LocalSwarm(planned, HASH, spawn=failing_server).start()

    assert list(runtime.iterdir()) == []
