"""The release on real nodes: `helm test` fails without a swarm, and an upgrade loses no request.

No container can write to its file system. The API server refuses no request of the chart's accounts.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from support.kubernetes.chart import CHART
from support.kubernetes.quickstart import NAMESPACE, ROOT
from support.kubernetes.release import SWARM, Release

from tools.devcluster.control_plane.kubectl import CommandFailed

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

EXAMPLE = ROOT / "examples" / "counting.yaml"
UPGRADE_SECONDS = 300
ANNOTATION = "gateway.podAnnotations.example\\.com/test"  # a new value replaces all gateways


def test_accounts_and_pods_have_only_the_rights_they_need(release: Release) -> None:
    release.wait_whole()
    assert refused(release) == []
    assert_no_pod_can_write(release)


def test_upgrade_of_the_gateways_loses_no_request(release: Release) -> None:
    release.wait_whole()
    with asking(release.url, SWARM) as answers:
        upgrade(release, "--set", f"{ANNOTATION}=again")
    assert len(answers) > 10
    assert {status for status, _ in answers} == {200}
    assert len({text for _, text in answers}) == 1
    print(f"{len(answers)} completions during the upgrade of two gateways, none refused")
    assert refused(release) == []


def test_helm_test_without_a_swarm_reports_it(release: Release) -> None:
    """New gateways report no swarm; a gateway that has served a swarm would report that one as not ready."""
    release.wait_whole()
    release.kubectl("delete", "modelswarm", SWARM, "--timeout=90s")
    try:
        release.wait("no server", lambda: not release.pods(), 120)
        upgrade(release, "--set", "test.timeoutSeconds=5", "--set", f"{ANNOTATION}=no-swarm")
        with pytest.raises(CommandFailed) as failed:
            helm_test(release)
        assert "there is no swarm: apply one first" in failed.value.stdout
    finally:
        upgrade(release, "--set", "test.timeoutSeconds=60")
        release.kubectl.apply(EXAMPLE.read_text(encoding="utf-8"))
        release.wait_whole()
    assert f"{SWARM}: one two three" in helm_test(release)


def helm_test(release: Release) -> str:
    return release.kubectl.helm("test", "modelswarm", "--logs", "--timeout=120s")


def upgrade(release: Release, *values: str) -> None:
    flags = ("--reset-then-reuse-values", "--wait", f"--timeout={UPGRADE_SECONDS}s")
    release.kubectl.helm("upgrade", "modelswarm", str(CHART), *flags, *values)


def assert_no_pod_can_write(release: Release) -> None:
    """Check that every pod runs as 65532 on a read-only file system."""
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
    """Send one request after another, each on a new connection, until the block ends."""
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
    """Return the refused requests of the release's accounts."""
    accounts = f"system:serviceaccount:{NAMESPACE}:modelswarm-"
    return [
        str(event["requestURI"])
        for event in release.cluster.api.audit_events()
        if json.dumps(event.get("user", {})).find(accounts) >= 0 and _code(event) == 403
    ]


def _code(event: dict[str, Any]) -> int:
    code: int = event.get("responseStatus", {}).get("code", 0)
    return code
