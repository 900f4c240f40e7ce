"""The README's commands, document and curl request, on the real demo model."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.processes.forked_process import fork_process

from modelswarm.local.planning import plan_document
from modelswarm.local.swarm import LocalSwarm
from modelswarm.resources.loading import load_document, parse_document

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ANY_PORT = (
    "--http",
    "127.0.0.1:0",
    "--grpc",
    "127.0.0.1:0",
    "--metrics",
    "127.0.0.1:0",
    "--admin",
    "127.0.0.1:0",
)


@dataclass(frozen=True, slots=True)
class Shown:
    """A swarm started as in the README, but on free ports."""

    url: str
    env: dict[str, str]

    def run(self, *arguments: str, say: str = "") -> str:
        """Return the output of a command that must succeed."""
        done = subprocess.run(
            [sys.executable, "-m", "modelswarm.cli", *arguments],
            input=say,
            capture_output=True,
            text=True,
            timeout=300,
            env=self.env,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def commands() -> dict[str, list[str]]:
    """Return the arguments of each subcommand in the README."""
    lines = re.findall(r"^\.venv/bin/modelswarm (.+)$", README, re.MULTILINE)
    words = [shlex.split(line, comments=True) for line in lines]
    return {command: [command, *arguments] for command, *arguments in words}


@pytest.fixture(scope="module", params=["forked", pytest.param("up", marks=pytest.mark.full)])
def shown(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shown]:
    """Yield the swarm of `modelswarm up`; in the fast tier its processes are forked, as four of them import torch."""
    runtime = str(tmp_path_factory.mktemp("run"))
    env = {**os.environ, "XDG_RUNTIME_DIR": runtime, "PYTHONUNBUFFERED": "1"}
    if request.param == "up":
        with started_by_command(env) as url:
            yield Shown(url, env)
        return
    command, document = commands()["up"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        assert command == "up"
        planned = plan_document(load_document(ROOT / document))
        with LocalSwarm(planned, spawn=fork_process) as swarm:
            yield Shown(f"http://{swarm.http}/v1", env)


@contextmanager
def started_by_command(env: dict[str, str]) -> Iterator[str]:
    """Run the README's `up`; yield the URL that it prints."""
    command = [sys.executable, "-m", "modelswarm.cli", *commands()["up"], *ANY_PORT]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
    try:
        assert up.stdout is not None
        ready = next((line for line in up.stdout if line.startswith("ready:")), "")
        found = re.search(r"http://\S+/v1", ready)
        assert found is not None, "up ended without being ready"
        yield found.group()
    finally:
        up.terminate()
        up.communicate(timeout=300)


def test_the_readme_shows_every_command_this_file_runs() -> None:
    run = {"plan", "up", "logs", "chat", "generate", "status", "routes", "drain"}
    assert set(commands()) == run


def test_plan_prints_spans_and_room(shown: Shown) -> None:
    out = shown.run(*commands()["plan"])
    assert "0:4" in out and "4:8" in out and "free KV tokens" in out


def test_chat_is_one_session_over_its_turns(shown: Shown) -> None:
    out = shown.run(*commands()["chat"], say="Count from 3 to 9.\nWhat is 2 + 2?\n/quit\n")
    assert "3 4 5 6 7 8 9" in out and "2 + 2 = 4." in out


def test_generate_goes_on_with_the_text(shown: Shown) -> None:
    assert "100 101" in shown.run(*commands()["generate"])


def test_status_shows_servers(shown: Shown) -> None:
    out = shown.run(*commands()["status"])
    assert "4:8" in out and "ready" in out


def test_logs_shows_last_lines_of_every_process(shown: Shown) -> None:
    out = shown.run(*commands()["logs"])
    assert "== gateway (" in out and "== counting-s0-r0 (" in out
    assert out.count(" INFO ") >= 2, "the last lines of both, whatever they say by now"


def test_routes_shows_costs(shown: Shown) -> None:
    out = shown.run(*commands()["routes"])
    assert "Costs of a hop" in out and "counting-s1-r1" in out


def test_drain_empties_a_server(shown: Shown) -> None:
    assert shown.run(*commands()["drain"]).endswith("counting-s0-r0: empty\n")


def test_the_curl_request_streams_the_count(shown: Shown) -> None:
    body = re.search(r"-d '(\{.*\})'", README)
    assert body is not None
    text, ended = "", False
    with httpx.stream(
        "POST", f"{shown.url}/chat/completions", json=json.loads(body.group(1)), timeout=300
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert ended
    assert text == " ".join(map(str, range(57, 71)))


def test_the_document_is_a_swarm() -> None:
    block = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert block is not None
    spec = parse_document(block.group(1), "README").spec
    assert (spec.model.source, spec.replicas) == ("demo://counting", 2)
