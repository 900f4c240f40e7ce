"""`modelswarm up` with real processes (hash model): all or nothing starts, crashes are repaired, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support.eventually import eventually
from support.models.tiny_models import make_model
from support.processes.forked_process import fork_process
from support.processes.server import alive, children, gone_within
from support.processes.swarm import HASH, plan, write_document

from modelswarm import Client
from modelswarm.cli.options.target import admin_target, http_target
from modelswarm.client.swarm import SwarmClient
from modelswarm.local.run_folder import RunFolder, list_runs
from modelswarm.local.supervisor import JobState
from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.identity import name_of

START_SECONDS = 120.0  # on a busy machine
ANY_PORTS = (
    "--http",
    "127.0.0.1:0",
    "--grpc",
    "127.0.0.1:0",
    "--metrics",
    "127.0.0.1:0",
    "--admin",
    "127.0.0.1:0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the runtime folder of this test's swarms."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"modelswarm-{os.getuid()}"


@contextmanager
def up(document: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a ready `modelswarm up` in a process of its own."""
    command = (sys.executable, "-m", "modelswarm.cli", "up", str(document), "--hash-model")
    with subprocess.Popen(
        (*command, *ANY_PORTS, *flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            output: list[str] = []
            while not any(line.startswith("in another terminal") for line in output):
                line = process.stdout.readline()
                assert line, "".join(output)
                output.append(line)
            yield process
        finally:
            process.kill()


def answer(swarm: LocalSwarm, base: str = "") -> str:
    with Client(base or f"http://{swarm.http}") as client:
        return client.complete("hello", model="tiny", max_tokens=20, temperature=0.0).text


def linked(swarm: LocalSwarm) -> set[str]:
    with SwarmClient(swarm.admin) as client:
        return {server.peer for server in client.fetch_snapshot().servers}


@pytest.mark.full
def test_killed_up_leaves_no_process_and_frees_its_name(
    folder: Path, tmp_path: Path, runtime: Path
) -> None:
    document = write_document(tmp_path / "swarm.yaml", folder, spans={"count": 2}, replicas=2)
    with up(document) as process:
        processes = children(process.pid)
        assert len(processes) == 5
        assert [run.name for run in list_runs()] == ["tiny"]

        process.kill()

        assert gone_within(processes, 60.0)  # a busy process notices late
    assert list_runs() == []
    assert (runtime / "tiny").exists()
    RunFolder.claim("other").release()
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(n, marks=pytest.mark.full) for n in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_stopped_up_leaves_no_process_and_no_file(
    folder: Path, tmp_path: Path, runtime: Path, number: signal.Signals
) -> None:
    document = write_document(tmp_path / "swarm.yaml", folder)
    with up(document) as process:
        processes = children(process.pid)
        process.send_signal(number)

        assert process.wait(60.0) == 0
    assert not any(alive(pid) for pid in processes)
    assert list(runtime.iterdir()) == []


def test_killed_server_is_replaced_and_answers_stay_the_same(folder: Path) -> None:
    with LocalSwarm(plan(folder, spans=2, replicas=2), HASH, spawn=fork_process) as swarm:
        before = answer(swarm)
        victim = swarm.servers[0]
        assert victim.member is not None
        swarm.kill(victim.slot.name)

        assert answer(swarm) == before
        assert swarm.wait_replaced(victim.slot.name, victim.job_status.incarnation, START_SECONDS)
        eventually("all are linked", lambda: len(linked(swarm)) == 4)
        assert victim.member.peer not in linked(swarm)
        assert victim.slot.name in {name_of(peer) for peer in linked(swarm)}
        assert swarm.coverage == 2
        assert answer(swarm) == before


@pytest.mark.full
def test_second_gateway_answers_for_a_stopped_one(folder: Path) -> None:
    settings = replace(HASH, gateways=2, publish=True)
    with LocalSwarm(plan(folder, spans=1, replicas=1), settings) as swarm:
        [run] = list_runs()
        first, second = run.gateways
        assert http_target(None, None).base == f"http://{first.http}"
        before = swarm.kill("gateway", signal.SIGSTOP)

        assert http_target(None, None).base == f"http://{second.http}"
        target = admin_target(None, None, None)
        assert (target.address, target.gateway) == (second.admin, "gateway2")
        text = answer(swarm, f"http://{second.http}")
        swarm.kill("gateway")

        assert swarm.wait_replaced("gateway", before.incarnation, START_SECONDS)
        assert swarm.gateway_addresses == (first, second)
        eventually("it has a model", lambda: can_answer(first.http), seconds=START_SECONDS)
        assert answer(swarm) == text
        assert [job.name for job in swarm.gateways] == ["gateway", "gateway2"]


def can_answer(http: str) -> bool:
    return httpx.get(f"http://{http}/ready", timeout=60).status_code == 200


def refused(*arguments: str) -> str:
    """Run a command that must exit with 2 and no traceback; return its stderr."""
    command = (sys.executable, "-m", "modelswarm.cli", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "starting" not in done.stdout
    return done.stderr


@pytest.mark.full
def test_a_port_in_use_is_named_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    document = write_document(tmp_path / "swarm.yaml", folder)
    for flag in ("--http", "--grpc", "--metrics", "--admin"):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            error = refused("up", str(document), *ANY_PORTS, flag, address)
        assert f"Error: {flag}: cannot listen on {address}: Address already in use" in error


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--http", "8000"), "--http: '8000' is not HOST:PORT"),
        (("--http", "127.0.0.1:99999"), "--http: '127.0.0.1:99999' is not HOST:PORT"),
        (
            ("--http", "127.0.0.1:8123", "--grpc", "127.0.0.1:8123"),
            "--grpc: 127.0.0.1:8123 is also",
        ),
        (("--http", "256.0.0.1:0"), "--http: cannot listen on 256.0.0.1:0"),
        (("--memory", "lots"), "--memory: 'lots' is not an amount of memory"),
        (("--memory", "10Ki"), "--memory: a server of blocks 0:4 needs"),
    ],
)
def test_impossible_flags_are_refused_before_start(
    folder: Path, tmp_path: Path, flags: tuple[str, ...], sentence: str
) -> None:
    document = write_document(tmp_path / "swarm.yaml", folder, spans={"count": 1})

    assert f"Error: {sentence}" in refused("up", str(document), *ANY_PORTS, *flags)


@pytest.mark.full
def test_document_that_cannot_run_is_refused_before_start(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "swarm.yaml"
    wrong: list[tuple[dict[str, object], str]] = [
        ({"replicas": 0}, "spec.replicas: 0 suspends the swarm"),
        ({"paused": True}, "spec.paused: true; allowed to start it: false"),
        ({"spans": {"count": 5}}, "spec.spans.count: 5 is not allowed for a model of 4 blocks"),
        ({"model": {"source": "pvc://claim"}}, "spec.model.source: pvc:// names a volume"),
        ({"model": {"source": "file:///nowhere"}}, "/nowhere is not a folder"),
        ({"sessions": {"maxLength": 513}}, "spec.sessions.maxLength: 513 is more than"),
        (
            {"model": {"source": f"file://{folder}", "revision": "main"}},
            "spec.model.revision: allowed only with an hf:// source",
        ),
    ]
    for spec, sentence in wrong:
        write_document(path, folder, **spec)
        assert sentence in refused("up", str(path), *ANY_PORTS)


@pytest.mark.full
def test_truncated_model_is_refused_before_start(tmp_path: Path) -> None:
    broken = make_model(tmp_path / "model", "llama")
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])

    error = refused("up", str(write_document(tmp_path / "swarm.yaml", broken)), *ANY_PORTS)

    assert shard.name in error


@pytest.mark.full
def test_second_swarm_of_the_same_name_is_refused(folder: Path) -> None:
    one = plan(folder, spans=1, replicas=1)
    with LocalSwarm(one, HASH) as swarm:
        with pytest.raises(Exception, match=r"a swarm 'tiny' runs already \(pid \d+\)"):
            LocalSwarm(one, HASH).start()

        assert [server.job_status.state for server in swarm.servers] == [JobState.READY]


@pytest.mark.full
def test_up_from_standard_input_tells_its_events_as_json(folder: Path, tmp_path: Path) -> None:
    document = write_document(tmp_path / "swarm.yaml", folder)
    flags = ("-", "--json", "--name", "other", "--hash-model", *ANY_PORTS)
    with (
        document.open() as typed,
        subprocess.Popen(
            (sys.executable, "-m", "modelswarm.cli", "up", *flags),
            stdin=typed,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        events = [json.loads(process.stdout.readline())]
        while events[-1]["event"] != "ready":
            events.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        rest = [json.loads(line) for line in process.stdout]

    assert process.returncode == 0
    states = [event for event in events if event["event"] == "process"]
    assert {(event["process"], event["state"]) for event in states} == {
        *((name, state) for name in ("gateway", "other-s0-r0") for state in ("starting", "ready"))
    }
    assert (events[-1]["name"], events[-1]["pid"]) == ("other", process.pid)
    assert [event["event"] for event in rest][:1] == ["stopping"]
    assert rest[-1]["event"] == "stopped"
