"""Hardware of real pods: threads by the CPU limit, and a GPU that is a number in the status of its node."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from support.kubernetes.api_client import swarm
from support.kubernetes.release import Release

from tools.devcluster.waiting import wait_for

CHANGE_SECONDS = 400.0
NAME = "hardware"


@pytest.fixture
def tidy(release: Release) -> Iterator[None]:
    yield
    release.kubectl("delete", "msw", NAME, "--ignore-not-found", "--timeout=90s")
    release.wait("no server of it", lambda: not release.pods(NAME), 120)


def condition(release: Release, kind: str) -> dict[str, Any]:
    """Return a condition of the swarm; empty until there is one."""
    found: list[dict[str, Any]] = release.kubectl.get("msw", NAME)["status"].get("conditions", [])
    return next((each for each in found if each["type"] == kind), {})


def apply_swarm(release: Release, **pool: Any) -> None:
    pools = [{"name": "only", **pool}]
    wanted = {"spans": {"count": 1}, "sessions": {"concurrent": 1, "maxLength": 64}}
    release.kubectl.apply(swarm(NAME, replicas=1, pools=pools, **wanted))


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("tidy")
def test_pool_with_a_gpu_that_is_absent_is_degraded(release: Release) -> None:
    apply_swarm(release, resources={"limits": {"nvidia.com/gpu": 1, "memory": "4Gi"}})
    wait_for(
        "the sentence of the server",
        lambda: condition(release, "Degraded").get("reason") == "DeviceUnusable",
        CHANGE_SECONDS,
        every=0.5,
        explain=lambda: release.kubectl.get("msw", NAME)["status"],
    )
    message = condition(release, "Degraded")["message"]
    assert "can't use its device: modelswarm-server: --device: cuda is not there: " in message
    assert condition(release, "Ready")["status"] == "False"


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize(("limit", "threads"), [("1", 1), ("500m", 1), ("2", 2)])
def test_threads_of_a_pod_follow_its_cpu_limit(release: Release, limit: str, threads: int) -> None:
    amounts = {"requests": {"cpu": "10m"}, "limits": {"cpu": limit, "memory": "1Gi"}}
    apply_swarm(release, resources=amounts)
    wait_for(
        "Ready",
        lambda: condition(release, "Ready").get("status") == "True",
        CHANGE_SECONDS,
        every=0.5,
        explain=lambda: release.kubectl.get("msw", NAME)["status"],
    )
    ((_, address),) = (
        (pod["metadata"]["name"], pod["status"]["podIP"]) for pod in release.pods(NAME)
    )
    with urllib.request.urlopen(f"http://{address}:7001/metrics", timeout=10) as page:
        shown = page.read().decode()
    assert f'modelswarm_server_threads{{blocks="0:8",model="{NAME}"}} {threads}.0' in shown
