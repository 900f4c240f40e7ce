"""A real Prometheus scrapes operators, gateways and servers of the release on real nodes. Every panel of the chart's
dashboard has data, and the loss of a pod is visible.
"""

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
from support.eventually import eventually
from support.kubernetes.api_client import PODS, ApiClient
from support.kubernetes.prometheus import (
    Prometheus,
    Targets,
    check_panels,
    config,
    follow_pods,
    run_prometheus,
    silent_panels,
    summary,
)
from support.kubernetes.quickstart import NAMESPACE
from support.kubernetes.release import SWARM, Release

pytestmark = pytest.mark.full

PROCESSES = 8  # two operators, two gateways, four servers
STREAMS, LONG = 4, 900  # LONG: tokens, for some seconds
SEEN_SECONDS = 60.0
REPLACED_SECONDS = 180.0
REROUTES = "sum(modelswarm_gateway_reroutes_total)"
RECOVERIES = "sum(modelswarm_gateway_recovery_seconds_count)"
COVERAGE = 'min(modelswarm_gateway_coverage{model="counting"})'
RUNS = re.compile(r'modelswarm_server_sessions\{.*state="running".*\} [1-9]')
CREATED = 'sum(modelswarm_operator_pods_created_total{role="server"})'


@pytest.mark.timeout(900)
def test_panels_answer_and_a_lost_pod_shows(release: Release, tmp_path: Path) -> None:
    release.wait_whole()
    with (
        Targets() as targets,
        follow_pods(release.cluster.api, targets, [NAMESPACE]),
        run_prometheus(config(targets, every="3s"), tmp_path / "prometheus") as prometheus,
    ):
        wait_number(prometheus, "count(up == 1)", PROCESSES)
        wait_number(prometheus, COVERAGE, 2)
        with ThreadPoolExecutor(4) as clients:
            list(clients.map(lambda _: count_to(release.url, 20), range(8)))
        before = {expr: prometheus.number(expr) for expr in (CREATED, REROUTES, RECOVERIES)}
        lose_midway(release)
        for expr in (REROUTES, RECOVERIES):
            wait_number(prometheus, expr, before[expr] + 1, at_least=True)
        wait_number(prometheus, f"min_over_time({COVERAGE}[2m:1s])", 1)
        wait_number(prometheus, CREATED, before[CREATED] + 1)
        wait_number(prometheus, COVERAGE, 2, seconds=REPLACED_SECONDS)
        check(release, prometheus)


def count_to(url: str, last: int) -> str:
    messages = [{"role": "user", "content": f"Count from 1 to {last}."}]
    body = {"model": "counting", "messages": messages, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def lose_midway(release: Release) -> None:
    """Lose a pod of running streams; the streams are completed.

    Its process is killed first: a graceful stop would migrate the streams without a recovery.
    """
    processes = release.cluster.main_pids(NAMESPACE)  # before the streams, which may be short
    with ThreadPoolExecutor(STREAMS) as clients, ApiClient(release.cluster.api) as client:
        streams = [clients.submit(long_answer, release.url) for _ in range(STREAMS)]
        pod = busy(release)
        for pid in processes[pod]:
            os.kill(pid, signal.SIGKILL)
        client.delete(f"{PODS.format(NAMESPACE)}/{pod}", gracePeriodSeconds=0)
        assert [stream.result() for stream in streams] == [LONG] * STREAMS


def long_answer(url: str) -> int:
    """Return the number of tokens of a stream, which must be complete."""
    body = {"model": "counting", "prompt": "count from 1 to 300:", "max_tokens": LONG,
            "ignore_eos": True, "return_token_ids": True, "stream": True}  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", lines[-1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return sum(len(e["choices"][0].get("token_ids", ())) for e in events if e["choices"])


def busy(release: Release) -> str:
    """Return the pod of a server with a running session."""
    found: list[str] = []

    def seen() -> bool:
        for pod in release.pods(SWARM):
            page = httpx.get(f"http://{pod['status']['podIP']}:7001/metrics", timeout=10).text
            found.extend(pod["metadata"]["name"] for line in page.splitlines() if RUNS.match(line))
        return bool(found)

    eventually("a running session", seen, SEEN_SECONDS)
    return found[-1]


def check(release: Release, prometheus: Prometheus) -> None:
    """Check that every panel of the chart's dashboard has data."""
    delivered: dict[str, Any] = release.kubectl.get("configmap", "modelswarm-dashboard-modelswarm")
    assert delivered["metadata"]["labels"]["grafana_dashboard"] == "1"
    asked = check_panels(json.loads(delivered["data"]["modelswarm.json"]), prometheus, window="5m")
    print(summary(asked, prometheus))
    silent = silent_panels(asked)
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

    eventually(
        f"{expr} to be {wanted}",
        seen,
        seconds,
        lambda: (prometheus.number(expr), prometheus.target_errors()),
    )
