"""Processes of two major versions of the protocol: one clear refusal, and a roll that goes swarm by swarm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from support.eventually import eventually
from support.processes.swarm import Endpoints, HashSwarm
from typing_extensions import override

from modelswarm.protocol.messages import PROTOCOL_VERSION

pytestmark = pytest.mark.full

TESTS = Path(__file__).parents[3]
NEXT = "support.processes.programs.next_major"


class NextSwarm(HashSwarm):
    """Processes of the next major version, which find those of another swarm, and are found by them.

    They are no forks: those have imported the present version already.
    """

    def __init__(self, root: Path, beside: HashSwarm) -> None:
        super().__init__(root)
        self.members, self.found_by = beside.members, beside.found_by
        self.started: list[subprocess.Popen[bytes]] = []

    @override
    def start(self, name: str, module: str, *flags: str) -> Any:
        command = [sys.executable, "-m", NEXT, *self.found_by, *flags, "--name", name]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        self.started.append(process)
        self.processes[name] = cast("Any", process)
        return process

    @override
    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.kill()
            process.wait()


@pytest.fixture
def swarms(tmp_path: Path) -> Iterator[tuple[HashSwarm, NextSwarm]]:
    with HashSwarm(tmp_path / "present") as present, NextSwarm(tmp_path / "next", present) as other:
        yield present, other


def ask(gateway: Endpoints, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": "go", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
    return answer.status_code, answer.json().get("choices")


def test_roll_to_the_next_major_goes_swarm_by_swarm(
    swarms: tuple[HashSwarm, NextSwarm],
) -> None:
    present, following = swarms
    for name in ("first", "second"):
        present.server(name, "0:4", model=name)
    present.servers_ready("first", "second")
    old = present.gateway()
    expected = {model: ask(old, model) for model in ("first", "second")}
    assert {status for status, _ in expected.values()} == {200}

    following.server("new-second", "0:4", model="second")
    following.servers_ready("new-second")
    new = following.gateway(name="new-gateway")
    major, minor = PROTOCOL_VERSION
    refusal = f"speaks {major + 1}.{minor}"
    log = present.root / "gateway.log"
    eventually("the old gateway refuses the new server", lambda: refusal in log.read_text())

    assert ask(new, "second") == expected["second"], "by the new server"
    assert ask(new, "first")[0] == 404, "its servers are of the other major"
    assert {model: ask(old, model) for model in expected} == expected, "by the old servers"
    present.kill("second")
    assert ask(new, "second") == expected["second"]
    assert ask(old, "first") == expected["first"]
    assert log.read_text().count(refusal) <= 2, "each refusal is logged once"
