"""A real Prometheus watches the whole of it: operator, gateways and servers in pods of a real cluster. Every panel of
the dashboard that the chart delivers has an answer, and the death of a pod shows."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.kubernetes.api_client import PODS, ApiClient
from support.kubernetes.prometheus import (
    Prometheus,
    Targets,
    check_panels,
    config,
    following,
    scraping,
    summary,
    wait_for,
)
from support.kubernetes.release import Release, installed

from tools.devcluster.real import RealCluster

PROCESSES = 8  # two operators, two gateways, four servers
STREAMS, LONG = 4, 900  # tokens: seconds
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
    with installed(cluster, namespace, tmp_path) as release:
        swarm = release.serve()
        with (
            Targets() as targets,
            following(cluster.api, targets, [namespace]),
            scraping(config(targets, every="3s"), tmp_path / "prometheus") as prometheus,
        ):
            wait_number(prometheus, "count(up == 1)", PROCESSES)
            wait_number(prometheus, COVERAGE, 2)
            with ThreadPoolExecutor(4) as clients:
                list(clients.map(lambda _: count_to(release.url, 20), range(8)))
            created = prometheus.number(CREATED)
            lose_midway(release, swarm)
            wait_for(lambda: prometheus.number(REROUTES) >= 1, SEEN_SECONDS, lambda: "no reroute")
            wait_number(prometheus, RECOVERIES, 1, at_least=True)
            wait_number(prometheus, f"min_over_time({COVERAGE}[2m:1s])", 1)
            wait_number(prometheus, CREATED, created + 1)
            wait_number(prometheus, COVERAGE, 2, seconds=REPLACED_SECONDS)
            check(release, prometheus)


def count_to(url: str, last: int) -> str:
    messages = [{"role": "user", "content": f"Count from 1 to {last}."}]
    body = {"model": "counting", "messages": messages, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def lose_midway(release: Release, swarm: str) -> None:
    """A pod that streams go through is lost while their tokens come; they are completed.

    Its process is killed first: one that is asked to stop would move the streams away, and no recovery would show.
    """
    space = release.kubectl.namespace
    processes = release.cluster.all_pids(space)  # now: the streams may be short
    with ThreadPoolExecutor(STREAMS) as clients, ApiClient(release.cluster.api) as plain:
        streams = [clients.submit(long_answer, release.url) for _ in range(STREAMS)]
        pod = busy(release, swarm)
        for pid in processes[pod]:
            os.kill(pid, signal.SIGKILL)
        plain.delete(f"{PODS.format(space)}/{pod}", gracePeriodSeconds=0)
        assert [stream.result() for stream in streams] == [LONG] * STREAMS


def long_answer(url: str) -> int:
    """Tokens of a stream that must not be broken off."""
    body = {"model": "counting", "prompt": "count from 1 to 300:", "max_tokens": LONG,
            "ignore_eos": True, "return_token_ids": True, "stream": True}  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", lines[-1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return sum(len(e["choices"][0].get("token_ids", ())) for e in events if e["choices"])


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
    print(summary(asked, prometheus))
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

    wait_for(
        seen,
        seconds,
        lambda: f"{expr} is {prometheus.number(expr)}, not {wanted}: {prometheus.troubles()}",
    )
