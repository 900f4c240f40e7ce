"""A real Prometheus at a real API server: it finds the pods of ModelSwarm, and the operator's panels all answer.

Servers are real processes whose pods exist at the API only; the operator's pods are played by a thread. The whole
cluster, with pods that run, has a test of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from support.kubernetes.operator_scene import scene, swarm
from support.kubernetes.pods_with_processes import PodSwarm
from support.kubernetes.prometheus import (
    Prometheus,
    Targets,
    check_panels,
    config,
    following,
    lint,
    scraping,
    wait_for,
)

from tools.dashboard.operator_rows import GATEWAY_VIEW, GATEWAY_WATCHES, OPERATOR_ROWS
from tools.devcluster.control_plane.api_level import ApiLevel
from tools.make_dashboard import TARGET

SEEN_SECONDS = 30.0
READY = 'max(modelswarm_operator_pods{state="ready"})'
CREATED = 'sum(modelswarm_operator_pods_created_total{role="server"})'


def wait_number(prometheus: Prometheus, expr: str, wanted: float) -> None:
    wait_for(
        lambda: prometheus.number(expr) == wanted,
        SEEN_SECONDS,
        lambda: f"{expr} is {prometheus.number(expr)}, not {wanted}: {prometheus.troubles()}",
    )


def test_pods_are_found_scraped_and_named_and_leave_with_their_pod(
    api: ApiLevel, namespace: str, tmp_path: Path
) -> None:
    with (
        PodSwarm(tmp_path, api, namespace) as pods,
        Targets() as targets,
        following(api, targets, [namespace]),
    ):
        pods.all_of({"a0": "0:2", "b0": "2:4"})
        with scraping(config(targets), tmp_path / "prometheus") as prometheus:
            wait_number(prometheus, "count(modelswarm_server_build_info)", 2)
            found = prometheus.query("modelswarm_server_build_info")
            assert {series.labels["pod"] for series in found} == {"a0", "b0"}
            for series in found:
                assert series.labels["namespace"] == namespace
                assert series.labels["swarm"] == series.labels["model"]
            assert {series.labels["blocks"] for series in found} == {"0:2", "2:4"}
            pods.bury("b0")
            wait_number(prometheus, "count(modelswarm_server_build_info)", 1)


def test_a_gateway_shows_what_it_knows_of_pods(
    api: ApiLevel, namespace: str, tmp_path: Path
) -> None:
    with PodSwarm(tmp_path, api, namespace) as pods:
        pods.all_of({"a0": "0:2", "b0": "2:4"})
        doors = pods.pod_gateway(whole=2)

        def known(state: str) -> float:
            return doors.metric("modelswarm_gateway_pods", state=state)

        assert (known("running"), known("terminating")) == (2, 0)
        assert doors.metric("modelswarm_gateway_pod_watch_up") == 1
        assert doors.metric("modelswarm_gateway_api_failures_total") == 0
        pods.delete("b0")
        wait_for(lambda: known("terminating") == 1, SEEN_SECONDS, lambda: "not seen to leave")
        assert (
            doors.metric("modelswarm_gateway_coverage") == 1
        )  # it lives, and serves until it ends
        pods.bury("b0")
        wait_for(lambda: known("terminating") == 0, SEEN_SECONDS, lambda: "not seen to go")
        wait_for(
            lambda: doors.metric("modelswarm_gateway_coverage") == 0,
            SEEN_SECONDS,
            lambda: "its blocks are held by nobody",
        )
        assert not lint(httpx.get(f"http://{doors.metrics}/metrics", timeout=10).content)


def test_every_panel_about_the_operator_has_an_answer_and_a_lost_pod_shows(
    api: ApiLevel, namespace: str, tmp_path: Path
) -> None:
    with (
        scene(api, namespace, tmp_path / "scene") as stage,
        stage.operator,
        Targets() as targets,
    ):
        stage.operator.wait_ready()
        targets.show_local({"operator": f"127.0.0.1:{stage.operator.port}"})
        with scraping(config(targets), tmp_path / "prometheus") as prometheus:
            wait_number(prometheus, "count(modelswarm_operator_build_info)", 1)
            stage.apply(swarm())
            stage.settle()
            wait_number(prometheus, READY, 4)
            wait_number(prometheus, CREATED, 4)
            stage.delete_pod(stage.live()[0])
            wait_number(prometheus, CREATED, 5)
            stage.settle()
            wait_number(prometheus, READY, 4)
            rows = [row.title for row in OPERATOR_ROWS]
            asked = check_panels(json.loads(TARGET.read_text()), prometheus, rows, window="2m")
            of_gateways = (GATEWAY_VIEW, GATEWAY_WATCHES)  # there are none here
            silent = [
                str(each) for each in asked if not each.answered and each.panel not in of_gateways
            ]
            assert not silent, "\n".join(silent)
            assert not lint(stage.operator.probe("metrics")[1].encode())
