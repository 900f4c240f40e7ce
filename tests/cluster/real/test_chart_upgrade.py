"""The installed chart at work in a real cluster: `helm test` asks for a completion, an upgrade loses no request, and no
account of the chart is ever refused anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.kubernetes.chart import CHART
from support.kubernetes.release import Release, installed

from tools.devcluster.control_plane.kubectl import CommandFailed
from tools.devcluster.real import RealCluster

UPGRADE_SECONDS = 180
NODES = "/api/v1/nodes"  # installed for one namespace: the operator looks whether it may see them, and may not


@pytest.mark.timeout(1500)  # with two nodes to start and images to build
def test_the_installed_chart_serves_is_tested_and_is_upgraded_under_load(
    cluster: RealCluster, namespace: str, tmp_path: Path
) -> None:
    with installed(cluster, namespace, tmp_path) as release:
        with pytest.raises(CommandFailed) as failed:  # nothing to ask yet: it fails, and soon
            helm_test(release, "--set", "test.timeoutSeconds=5")
        assert "there is no swarm: apply one first" in failed.value.stdout
        swarm = release.serve()
        said = helm_test(release, "--set", "test.timeoutSeconds=60")
        assert f"{swarm}: one two three" in said
        assert_nobody_can_write(release)
        with asking(release.url, swarm) as answers:
            upgrade(release, "--set", "gateway.podAnnotations.example\\.com/again=yes")
        assert len(answers) > 10
        assert {status for status, _ in answers} == {200}
        assert len({text for _, text in answers}) == 1
        print(f"{len(answers)} completions during the upgrade of two gateways, none refused")
        assert [path for path in refused(release) if not path.startswith(NODES)] == []


def helm_test(release: Release, *values: str) -> str:
    upgrade(release, *values)
    return release.kubectl.helm("test", "modelswarm", "--logs", "--timeout=120s")


def upgrade(release: Release, *values: str) -> None:
    flags = ("--reset-then-reuse-values", "--wait", f"--timeout={UPGRADE_SECONDS}s")
    release.kubectl.helm("upgrade", "modelswarm", str(CHART), *flags, *values)


def assert_nobody_can_write(release: Release) -> None:
    """Of every kind of pod: its user, and its file system."""
    for pod in release.kubectl.items("pods"):
        if pod["status"]["phase"] != "Running":
            continue
        name = pod["metadata"]["name"]
        script = "import os; print(os.getuid()); open('/opt/modelswarm/x', 'w')"
        with pytest.raises(CommandFailed) as failed:
            release.kubectl("exec", name, "--", "python", "-c", script)
        assert failed.value.stdout.strip() == "65532"
        assert "Read-only file system" in failed.value.stderr


@contextmanager
def asking(url: str, model: str) -> Iterator[list[tuple[int, str]]]:
    """A client with a new connection for each request, one after the other, until the block ends."""
    answers: list[tuple[int, str]] = []
    enough = threading.Event()
    body = {"model": model, "prompt": "one two three", "max_tokens": 8, "temperature": 0}

    def ask() -> None:
        while not enough.is_set():
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
            answers.append((answer.status_code, text))

    client = threading.Thread(target=ask, name="client")
    client.start()
    try:
        yield answers
    finally:
        enough.set()
        client.join(90)
    assert not client.is_alive()


def refused(release: Release) -> list[str]:
    """What the API server forbade the accounts of this release."""
    accounts = f"system:serviceaccount:{release.kubectl.namespace}:modelswarm-"
    return [
        str(event["requestURI"])
        for event in release.cluster.api.audit_events()
        if json.dumps(event.get("user", {})).find(accounts) >= 0 and _code(event) == 403
    ]


def _code(event: dict[str, Any]) -> int:
    code: int = event.get("responseStatus", {}).get("code", 0)
    return code
