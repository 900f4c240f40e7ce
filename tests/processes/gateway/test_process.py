"""The gateway as a process: flags, ports, signals, its parent, and its imports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.eventually import eventually
from support.processes.http_requests import FOREVER, IDS, LONG, lines, tokens_of
from support.processes.swarm import ENDLESS, two_spans

from modelswarm_gateway.__main__ import main

LATE = 1500  # tokens; the stop comes during this answer, which ends before the drain does


@pytest.mark.full
def test_stop_lets_answers_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=4096) as swarm:
        endpoints = swarm.gateway()
        got: list[int] = []
        ended = False
        for line in lines(endpoints, IDS | {"max_tokens": LATE}):
            got += tokens_of(line)
            if not ended and got:
                swarm.kill("gateway", signal.SIGTERM)
                ended = True
                with httpx.Client(base_url=endpoints.url) as client:
                    answer = client.post("/v1/completions", json=LONG)
                    assert answer.status_code == 503
                    assert answer.json()["error"]["code"] == "gateway_stopping"
                    assert client.get("/ready").status_code == 503
                    assert client.get("/health").status_code == 200
        assert len(got) == LATE
        assert swarm.processes["gateway"].wait(10) == 0
        assert not (tmp_path / "gateway.json").exists()


@pytest.mark.full
def test_answer_that_outlasts_the_drain_gets_an_error(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway("--drain-timeout", "0.5")
        swarm.kill("s1")
        eventually("it is noticed", lambda: not swarm.is_ready(endpoints))
        swarm.server("s2", "2:4")
        eventually("it is back", lambda: swarm.is_ready(endpoints))
        received: list[str] = []
        for line in lines(endpoints, FOREVER):
            received.append(line)
            if len(received) == 10:
                swarm.kill("s2")  # from here on the session is held
                swarm.kill("gateway", signal.SIGINT)
        assert '"code": "gateway_stopping"' in received[-1]
        assert swarm.processes["gateway"].wait(10) == 0


@pytest.mark.full
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway()
        stream = lines(endpoints, FOREVER)
        next(stream)
        swarm.kill("s1")
        swarm.kill("gateway", signal.SIGTERM)
        eventually("it stops", lambda: not swarm.is_ready(endpoints))
        swarm.kill("gateway", signal.SIGTERM)
        assert swarm.processes["gateway"].wait(20) == 1  # the drain alone would take 30 s
        with contextlib.suppress(httpx.HTTPError):
            stream.close()


@pytest.mark.full
def test_process_ends_with_its_parent(tmp_path: Path) -> None:
    with started_gateway(tmp_path, "127.0.0.1") as (process, end_parent):
        end_parent()
        assert process.wait(30) == 1


def test_wildcard_is_announced_as_it_was_given(tmp_path: Path) -> None:
    """A socket of all addresses has the host `::`, which a machine without IPv6 cannot dial."""
    with started_gateway(tmp_path, "0.0.0.0"):
        announced = json.loads((tmp_path / "gateway.json").read_text())
    for flag in ("http", "grpc", "metrics", "admin"):
        host, _, port = announced[flag].rpartition(":")
        assert host == "0.0.0.0" and int(port) > 0


@contextlib.contextmanager
def started_gateway(
    folder: Path, host: str
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], None]]]:
    """Yield a gateway on free ports of the host, and a function that ends its parent."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "modelswarm_gateway", "--discovery-dir", str(folder)]
    for flag in ("--http", "--grpc", "--metrics", "--admin"):
        command += [flag, f"{host}:0"]
    command += ["--parent-fd", str(read), "--run-file", str(folder / "gateway.json")]
    process = subprocess.Popen(command, pass_fds=[read], stderr=subprocess.DEVNULL)
    os.close(read)
    closing = contextlib.ExitStack()
    closing.callback(os.close, write)
    try:
        eventually("it is up", (folder / "gateway.json").exists)
        yield process, closing.close
    finally:
        closing.close()
        process.kill()
        process.wait(60)


@pytest.mark.full
@pytest.mark.parametrize("flag", ["http", "grpc", "metrics", "admin"])
def test_a_port_in_use_is_one_sentence_and_exit_code_two(tmp_path: Path, flag: str) -> None:
    ports = dict.fromkeys(("http", "grpc", "metrics", "admin"), "127.0.0.1:0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports[flag] = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [part for name, target in ports.items() for part in (f"--{name}", target)]
        done = run("--discovery-dir", str(tmp_path), "--run-file", str(tmp_path / "g.json"), *flags)
    assert done.returncode == 2
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith(f"modelswarm-gateway: --{flag}: cannot listen on {ports[flag]}")
    assert not (tmp_path / "g.json").exists()


@pytest.mark.full
def test_run_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """Kubernetes and `up` show the last line."""
    path = tmp_path / "no folder" / "g.json"
    path.parent.touch()
    ports = [f"--{name}=127.0.0.1:0" for name in ("http", "grpc", "metrics", "admin")]
    done = run("--discovery-dir", str(tmp_path), "--run-file", str(path), *ports)
    assert done.returncode == 2
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith(f"modelswarm-gateway: --run-file: {path} cannot be written: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--discovery-dir"),
        (["--discovery-dir", "x", "--http", "8000"], "--http: '8000' is not HOST:PORT"),
        (["--discovery-dir", "x", "--grpc", "localhost:99999"], "--grpc"),
        (["--discovery-dir", "x", "--name", "a/b"], "--name: allowed are"),
        (["--discovery-dir", "x", "--drain-timeout", "-1"], "--drain-timeout"),
        (["--discovery-dir", "x", "--parent-fd", "99"], "--parent-fd: 99 is not an open"),
        (["--discovery-dir", "x", "--what"], "--what"),
        (
            ["--discovery-dir", "x", "--hold-limit", "3", "--keepalive", "3"],
            "--keepalive: 3 s is not below --hold-limit 3 s",
        ),
        (
            ["--discovery-dir", "x", "--hold-limit", "3", "--fence-timeout", "4"],
            "--fence-timeout: 4 s is more than --hold-limit 3 s",
        ),
        (
            ["--discovery-dir", "x", "--suspect-after", "5"],
            "--suspect-after: 5 s is not below --fence-timeout 5 s",
        ),
        (
            ["--discovery-dir", "x", "--kubernetes"],
            "--discovery-dir: give either --discovery-dir FOLDER or --kub",
        ),
        (
            ["--kubernetes", "--namespace", "A b"],
            "--namespace: 'A b' is not a valid namespace name",
        ),
        (["--kubernetes", "--kubeconfig", "/no/such/file"], "--kubeconfig: no usable kubeconfig"),
        (["--kubernetes", "--kubeconfig", "/etc/passwd"], "--kubeconfig: no usable kubeconfig"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_code_two(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert message in sentence


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelswarm_gateway", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_gateway_loads_no_torch_and_no_transformers() -> None:
    code = (
        "import sys, modelswarm_gateway.app, modelswarm_gateway.discovery.kubernetes_source;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"
