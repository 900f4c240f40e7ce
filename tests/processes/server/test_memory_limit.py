"""Servers under a container's memory limit: refused before they load, or never killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from support.eventually import eventually
from support.processes.memory_group import NEW, LimitedServers, filling_asks, memory_group
from support.processes.server import refusal
from support.processes.swarm import PAGES, READY_SECONDS, Running, local_settings, metrics, total

from modelswarm.errors import MemoryLimitError, UserError
from modelswarm.local.planning import plan_document
from modelswarm.local.swarm import LocalSwarm
from modelswarm.placement.memory import PROCESS_BYTES
from modelswarm.placement.plan import SwarmPlan
from modelswarm.placement.quantity import bytes_of
from modelswarm.resources.spec import ModelSwarm
from modelswarm_serving.app import load
from modelswarm_serving.settings import parse_settings

GIB = 1 << 30
CONTEXT = 4096
FLAGS = ("--model", "demo://counting", "--blocks", "0:8", "--max-length", "4096", "--name", "s")


def plan(memory: str, spans: int) -> SwarmPlan:
    """Return a plan without `sessions.concurrent`: KV gets the rest of the limit."""
    document = {
        "apiVersion": "modelswarm.io/v1alpha1",
        "kind": "ModelSwarm",
        "metadata": {"name": "limited"},
        "spec": {
            "model": {"source": "demo://counting"},
            "spans": {"count": spans},
            "replicas": 1,
            "pools": [{"name": "cpu", "resources": {"limits": {"memory": memory}}}],
        },
    }
    return plan_document(ModelSwarm.parse(document))


def write_limit(root: Path, limit: int, resident: int = 0) -> Path:
    """Write the files of a container with this limit, and of a process with this size, below `root`."""
    for path, text in (
        ("proc/self/cgroup", "0::/\n"),
        ("proc/self/status", f"VmRSS:\t{resident >> 10} kB\n"),
        ("sys/fs/cgroup/memory.max", f"{limit}\n"),
    ):
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_server_above_its_limit_is_refused_unloaded(tmp_path: Path) -> None:
    """940 MiB of KV in a container of 1 GiB, as in the bug report."""
    settings = parse_settings([*FLAGS, "--pages", "7524"])
    with pytest.raises(MemoryLimitError, match="a memory limit of 1 GiB; set ") as refused:
        load(settings, write_limit(tmp_path, GIB))
    assert "process 768 MiB" in str(refused.value) and "KV 940 MiB" in str(refused.value)


def test_server_of_the_plan_loads_within_its_limit(tmp_path: Path) -> None:
    (server,) = plan("1Gi", 1).servers
    settings = parse_settings([*FLAGS, "--pages", str(server.pages)])
    loaded = load(settings, write_limit(tmp_path, GIB, PROCESS_BYTES))
    assert loaded.model.shape.total_pages == server.pages


def test_measured_process_replaces_a_smaller_constant(tmp_path: Path) -> None:
    (server,) = plan("1Gi", 1).servers
    settings = parse_settings([*FLAGS, "--pages", str(server.pages)])
    with pytest.raises(MemoryLimitError, match=r"process 900 MiB, .* set spec\.sessions\.conc"):
        load(settings, write_limit(tmp_path, GIB, 900 << 20))


@pytest.mark.full
def test_server_on_a_cpu_imports_no_triton_and_fits_its_plan() -> None:
    """As the build of the server image measures it."""
    code = (
        "from pathlib import Path\n"
        "from modelswarm_serving.runtime.process_memory import main\n"
        "assert main() == 0\n"
        "assert 'libtorch' in (maps := Path('/proc/self/maps').read_text())\n"
        "assert 'libtriton' not in maps\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a server takes " in done.stdout


@pytest.mark.full
def test_server_in_a_real_group_is_refused_not_killed() -> None:
    with memory_group(GIB) as group:
        command = [sys.executable, "-m", "modelswarm_serving", *FLAGS, "--pages", "7524"]
        code, said = asyncio.run(refusal(*group.wrap(command)))
        assert code == MemoryLimitError.exit_code, said
        assert "a memory limit of 1 GiB; set spec.sessions.concurrent to " in said.splitlines()[-1]
        assert group.kills() == 0


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("memory", ["700Mi", "900Mi", "1000M"])
def test_planned_servers_survive_full_load_in_a_group(memory: str) -> None:
    try:
        wanted = plan(memory, 2)
    except UserError as refused:
        assert "; allowed: at least " in refused.message
        assert memory == "700Mi"
        return
    limit = bytes_of(memory, "memory")
    settings = local_settings(f"limited-{memory.lower()}")
    with LimitedServers(limit) as servers, LocalSwarm(wanted, settings, spawn=servers) as local:
        running = Running(local)
        try:
            eventually("the swarm is whole", lambda: ready(running), READY_SECONDS)
            fill(running, wanted)
            assert {name: group.kills() for name, group in servers.groups.items()} == dict.fromkeys(
                servers.groups, 0
            )
            assert [server.job_status.incarnation for server in local.servers] == [1, 1]
        finally:
            running.close()


def ready(running: Running) -> bool:
    return any(model.ready for model in running.view.fetch_snapshot().models)


def fill(running: Running, wanted: SwarmPlan) -> None:
    """Fill the admissible pages of the smallest server, but less than a session and the tenth for recoveries."""
    pages = min(server.pages for server in wanted.servers)
    for asks in filling_asks(pages, CONTEXT, "limited"):
        answers = running.ask_all(asks)
        assert [len(answer.tokens) for answer in answers] == [NEW] * len(asks)
    for member in running.members():
        values = metrics(member.metrics)
        every, free = total(values, PAGES), total(values, PAGES, 'state="free"')
        assert every - free > pages * 0.8, (free, every, pages)
