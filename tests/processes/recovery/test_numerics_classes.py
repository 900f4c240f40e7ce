"""Servers whose kernels are limited by a variable are of another numerics class: a repair avoids it while it can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.eventually import eventually
from support.processes.http_requests import whole
from support.processes.swarm import Endpoints, HashSwarm

from modelswarm.client.swarm import SwarmClient
from modelswarm.protocol.identity import name_of

FLAGS = ("--model", "demo://counting", "--pages", "64", "--threads", "1", "--blocks")
LIMIT = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "avx2"}
STREAM: dict[str, Any] = {
    "model": "counting",
    "prompt": "1 2 3",
    "max_tokens": 40,
    "ignore_eos": True,
    "return_token_ids": True,
    "session_id": "counts",
}


def start_limited(swarm: HashSwarm, name: str) -> subprocess.Popen[bytes]:
    """Start a server by exec: torch reads the variables only once."""
    command = [sys.executable, "-m", "modelswarm_serving", *swarm.found_by, "--name", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **LIMIT}
    with (swarm.root / f"{name}.log").open("ab") as log:
        return subprocess.Popen([*command, *FLAGS, "4:8"], env=environment, stderr=log)


def classes(gateway: Endpoints) -> dict[str, str]:
    with SwarmClient(gateway.admin) as client:
        return {name_of(each.peer): each.numerics for each in client.fetch_snapshot().servers}


def changes(gateway: Endpoints) -> float:
    return gateway.metric("modelswarm_gateway_numerics_changes_total")


def wait_linked(gateway: Endpoints, count: int) -> None:
    eventually(f"{count} servers are linked", lambda: len(classes(gateway)) == count)


@pytest.mark.full
def test_repair_prefers_its_class_and_reports_a_change(tmp_path: Path) -> None:
    with HashSwarm(tmp_path) as swarm:
        for name, blocks in (("head", "0:4"), ("tail", "4:8")):
            swarm.start(name, "modelswarm_serving", *FLAGS, blocks)
        gateway = swarm.gateway()
        first = whole(gateway, STREAM)
        limited = start_limited(swarm, "limited")
        try:
            swarm.start("same", "modelswarm_serving", *FLAGS, "4:8")
            wait_linked(gateway, 4)
            found = classes(gateway)
            assert found["same"] == found["tail"] and found["tail"].startswith("cpu-")
            assert found["limited"] == (
                f"{found['tail']}/ATEN_CPU_CAPABILITY=avx2/ONEDNN_MAX_CPU_ISA=avx2"
            )
            swarm.kill("tail")
            wait_linked(gateway, 3)
            assert whole(gateway, STREAM) == first
            assert changes(gateway) == 0
            swarm.kill("same")
            wait_linked(gateway, 2)
            assert whole(gateway, STREAM) == first
            assert changes(gateway) == 1
            told = f"numerics class {found['limited']} instead of {found['same']}"
            assert told in swarm.log("gateway")
        finally:
            limited.kill()
            limited.wait(10)
