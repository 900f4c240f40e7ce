"""A real Prometheus watches the whole of it: operator, gateways and servers in pods of a real cluster. Every panel of
the dashboard that the chart delivers has an answer, and the death of a pod shows."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.kube.real import RealCluster
from cluster.prometheus import Prometheus, check_panels, file_config, scraping, wait_for
from cluster.prometheus_pods import following
from cluster.release import Release, installed

PROCESSES = 8  # two operators, two gateways, four servers
SEEN_SECONDS = 60.0
REPLACED_SECONDS = 180.0
REROUTES = "sum(modelswarm_gateway_reroutes_total)"
RECOVERIES = "sum(modelswarm_gateway_recovery_seconds_count)"
COVERAGE = "min(modelswarm_gateway_coverage)"
RUNS = re.compile(r'modelswarm_server_sessions\{.*state="running".*\} [1-9]')
CREATED = 'sum(modelswarm_operator_pods_created_total{role="server"})'


@pytest.mark.timeout(1200)  # with two nodes to start and images to build
def test_prometheus_sees_every_pod_every_panel_answers_and_a_kill_shows(
    cluster: RealCluster, namespace: str, tmp_path: Path
) -> None:
    targets = tmp_path / "targets.json"
    with installed(cluster, namespace, tmp_path) as release:
        swarm = release.serve()
        with (
            following(cluster.api, targets, [namespace]),
            scraping(file_config(targets), tmp_path / "prometheus") as prometheus,
        ):
            wait_number(prometheus, "count(up == 1)", PROCESSES)
            wait_number(prometheus, COVERAGE, 2)
            with ThreadPoolExecutor(4) as clients:
                list(clients.map(lambda _: count_to(release.url, 20), range(8)))
            created = prometheus.number(CREATED)
            delete_midway(release, swarm)
            wait_for(lambda: prometheus.number(REROUTES) >= 1, SEEN_SECONDS, lambda: "no reroute")
            wait_number(prometheus, RECOVERIES, 1, at_least=True)
            wait_number(prometheus, f"min_over_time({COVERAGE}[2m:1s])", 1)
            wait_number(prometheus, CREATED, created + 1)
            wait_number(prometheus, COVERAGE, 2, seconds=REPLACED_SECONDS)
            check(release, prometheus)


def count_to(url: str, last: int) -> str:
    body = {"model": "counting", "messages": question(last), "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def question(last: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Count from 1 to {last}."}]


def delete_midway(release: Release, swarm: str) -> None:
    """A pod of a stream's route is deleted without grace while its tokens come; the stream is completed."""
    body = {"model": swarm, "messages": question(100), "stream": True, "temperature": 0}
    url = f"{release.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        release.kubectl("delete", "pod", busy(release, swarm), "--grace-period=0", "--force")
        assert list(filter(None, lines))[-1] == "data: [DONE]"


def busy(release: Release, swarm: str) -> str:
    """The pod of a server on which a session runs."""
    found: list[str] = []

    def seen() -> bool:
        for pod in release.servers(swarm):
            page = httpx.get(f"http://{pod['status']['podIP']}:7001/metrics", timeout=10).text
            found.extend(pod["metadata"]["name"] for line in page.splitlines() if RUNS.match(line))
        return bool(found)

    wait_for(seen, SEEN_SECONDS, lambda: "no session runs anywhere")
    return found[-1]


def check(release: Release, prometheus: Prometheus) -> None:
    """The dashboard as the chart delivered it."""
    delivered: dict[str, Any] = release.kubectl.get("configmap", "modelswarm-dashboard-modelswarm")
    assert delivered["metadata"]["labels"]["grafana_dashboard"] == "1"
    asked = check_panels(json.loads(delivered["data"]["modelswarm.json"]), prometheus, window="5m")
    silent = [str(each) for each in asked if not each.answered]
    assert not silent, "\n".join(silent)


def wait_number(
    prometheus: Prometheus,
    expr: str,
    wanted: float,
    *,
    at_least: bool = False,
    seconds: float = SEEN_SECONDS,
) -> None:
    def seen() -> bool:
        found = prometheus.number(expr)
        return found >= wanted if at_least else found == wanted

    wait_for(seen, seconds, lambda: f"{expr} is {prometheus.number(expr)}, not {wanted}")
