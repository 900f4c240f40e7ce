"""Memory limits of real pods without `sessions.concurrent`.

Each swarm becomes Ready or is refused. No container is killed while sessions use all pages.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from support.kubernetes.api_client import swarm
from support.kubernetes.release import Release
from support.processes.memory_group import NEW, filling_asks

from modelswarm.placement.quantity import bytes_of
from tools.devcluster.waiting import wait_for

CHANGE_SECONDS = 400.0
CONTEXT = 4096
NAME = "limited"
PAGES = "modelswarm_server_kv_pages"


@pytest.fixture
def tidy(release: Release) -> Iterator[None]:
    yield
    release.kubectl("delete", "msw", NAME, "--ignore-not-found", "--timeout=90s")
    release.wait("no server of it", lambda: not release.pods(NAME), 120)


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize(
    ("memory", "spans", "fits"),
    [("700Mi", 2, False), ("900Mi", 2, True), ("1Gi", 2, True), ("2Gi", 1, True)],
)
def test_limited_swarm_is_ready_or_refused_never_killed(
    release: Release, memory: str, spans: int, fits: bool
) -> None:
    pools = [{"name": "cpu", "resources": {"limits": {"memory": memory}}}]
    release.kubectl.apply(swarm(NAME, spans={"count": spans}, replicas=1, pools=pools))
    told = wait_for(
        "an answer",
        lambda: outcome(release),
        CHANGE_SECONDS,
        every=0.5,
        explain=lambda: explained(release),
    )
    assert told
    if not fits:
        assert told["reason"] == "InvalidSpec" and not release.pods(NAME)
        assert "but has 700 MiB; allowed: at least " in told["message"]
        return
    assert told["type"] == "Ready", told
    planned = release.kubectl.get("msw", NAME)["status"]["plan"]["spans"]
    for span in planned:
        assert bytes_of(span["memory"]["total"], "total") <= bytes_of(memory, "memory") + (1 << 20)
    wait_for("every gateway to answer", lambda: release.serves(NAME), CHANGE_SECONDS)
    pages = min(span["pages"] for span in planned)
    for asks in filling_asks(pages, CONTEXT, NAME):
        answers = [stream.answer() for stream in [release.stream(ask) for ask in asks]]
        assert [len(answer.tokens) for answer in answers] == [NEW] * len(asks)
    for pod in release.pods(NAME):
        every, free = pages_of(pod)
        assert every - free > pages * 0.8, explained(release)
        (container,) = pod["status"]["containerStatuses"]
        assert container["restartCount"] == 0 and not container["lastState"], container


def outcome(release: Release) -> dict[str, Any] | None:
    """Return the condition of the outcome: Ready, or the reason why the swarm cannot become Ready."""
    stored = release.kubectl.get("msw", NAME)
    current = stored["metadata"]["generation"]
    for each in stored.get("status", {}).get("conditions", ()):
        if each["observedGeneration"] != current or each["status"] != "True":
            continue
        if each["type"] == "Ready" or each["reason"] in ("InvalidSpec", "OutOfMemory"):
            return dict(each)
    return None


def pages_of(pod: dict[str, Any]) -> tuple[float, float]:
    """Return the numbers of all pages and of free pages of a server."""
    address = f"http://{pod['status']['podIP']}:7001/metrics"
    with urllib.request.urlopen(address, timeout=60) as answer:
        lines = [
            line for line in answer.read().decode().splitlines() if line.startswith(f"{PAGES}{{")
        ]
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    return sum(values.values()), sum(v for name, v in values.items() if 'state="free"' in name)


def explained(release: Release) -> str:
    stored = json.dumps(release.kubectl.get("msw", NAME).get("status", {}), indent=1)
    return f"{stored}\n{release.kubectl('get', 'pods', '-o', 'wide')}"
