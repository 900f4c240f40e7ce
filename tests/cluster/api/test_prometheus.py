"""A real Prometheus at a real API server: it finds the pods of ModelSwarm, and every operator panel has data.

Servers are real processes whose pods exist only in the API; a thread acts as the kubelet of the operator's pods.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from support.eventually import eventually
from support.kubernetes.operator_scene import scene, swarm
from support.kubernetes.pods_with_processes import PodSwarm
from support.kubernetes.prometheus import (
    Prometheus,
    Targets,
    check_panels,
    config,
    follow_pods,
    lint,
    run_prometheus,
)

from tools.dashboard.operator_rows import GATEWAY_VIEW, GATEWAY_WATCHES, OPERATOR_ROWS
from tools.devcluster.control_plane.api_level import ApiLevel
from tools.make_dashboard import TARGET

pytestmark = pytest.mark.full

SEEN_SECONDS = 120.0
READY = 'max(modelswarm_operator_pods{state="ready"})'
CREATED = 'sum(modelswarm_operator_pods_created_total{role="server"})'


def wait_number(prometheus: Prometheus, expr: str, wanted: float) -> None:
    eventually(
        f"{expr} to be {wanted}",
        lambda: prometheus.number(expr) == wanted,
        SEEN_SECONDS,
        lambda: (prometheus.number(expr), prometheus.target_errors()),
    )


def test_targets_come_and_go_with_their_pods(api: ApiLevel, namespace: str, tmp_path: Path) -> None:
    with (
        PodSwarm(tmp_path, api, namespace) as pods,
        Targets() as targets,
        follow_pods(api, targets, [namespace]),
    ):
        pods.start_pods({"a0": "0:2", "b0": "2:4"})
        with run_prometheus(config(targets), tmp_path / "prometheus") as prometheus:
            wait_number(prometheus, "count(modelswarm_server_build_info)", 2)
            found = prometheus.query("modelswarm_server_build_info")
            assert {series.labels["pod"] for series in found} == {"a0", "b0"}
            for series in found:
                assert series.labels["namespace"] == namespace
                assert series.labels["swarm"] == series.labels["model"]
            assert {series.labels["blocks"] for series in found} == {"0:2", "2:4"}
            pods.remove_pod("b0")
            wait_number(prometheus, "count(modelswarm_server_build_info)", 1)


def test_gateway_metrics_count_the_known_pods(
    api: ApiLevel, namespace: str, tmp_path: Path
) -> None:
    with PodSwarm(tmp_path, api, namespace) as pods:
        pods.start_pods({"a0": "0:2", "b0": "2:4"})
        endpoints = pods.pod_gateway(whole=2)

        def known(state: str) -> float:
            return endpoints.metric("modelswarm_gateway_pods", state=state)

        assert (known("running"), known("terminating")) == (2, 0)
        assert endpoints.metric("modelswarm_gateway_pod_watch_up") == 1
        assert endpoints.metric("modelswarm_gateway_kube_api_failures_total") == 0
        pods.delete_pod("b0")
        eventually("a terminating pod", lambda: known("terminating") == 1, SEEN_SECONDS)
        assert endpoints.metric("modelswarm_gateway_coverage") == 1  # the server runs until its end
        pods.remove_pod("b0")
        eventually("its end", lambda: known("terminating") == 0, SEEN_SECONDS)
        eventually(
            "its blocks to be missed",
            lambda: endpoints.metric("modelswarm_gateway_coverage") == 0,
            SEEN_SECONDS,
        )
        assert not lint(httpx.get(f"http://{endpoints.metrics}/metrics", timeout=10).content)


def test_operator_panels_answer_and_show_a_lost_pod(
    api: ApiLevel, namespace: str, tmp_path: Path
) -> None:
    with (
        scene(api, namespace, tmp_path / "scene") as stage,
        stage.operator,
        Targets() as targets,
    ):
        stage.operator.wait_ready()
        targets.show_local({"operator": f"127.0.0.1:{stage.operator.port}"})
        with run_prometheus(config(targets), tmp_path / "prometheus") as prometheus:
            wait_number(prometheus, "count(modelswarm_operator_build_info)", 1)
            stage.apply(swarm())
            stage.settle()
            wait_number(prometheus, READY, 4)
            wait_number(prometheus, CREATED, 4)
            stage.delete_pod(stage.live_pods()[0])
            wait_number(prometheus, CREATED, 5)
            stage.settle()
            wait_number(prometheus, READY, 4)
            rows = [row.title for row in OPERATOR_ROWS]
            asked = check_panels(json.loads(TARGET.read_text()), prometheus, rows, window="2m")
            of_gateways = (GATEWAY_VIEW, GATEWAY_WATCHES)  # no gateway runs here
            silent = [
                str(each) for each in asked if not each.answered and each.panel not in of_gateways
            ]
            assert not silent, "\n".join(silent)
            assert not lint(stage.operator.probe("metrics")[1].encode())
