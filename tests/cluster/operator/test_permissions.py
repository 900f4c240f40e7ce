"""Missing rights of the operator: it names them, waits without a crash, and continues when they are granted.

The account gets the rights of `access_review.needs`, which also test the chart.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.kubernetes.operator_process import Operator, grant
from support.kubernetes.operator_scene import Scene, scene, swarm

from modelswarm_operator.kube.access_review import (
    Permission,
    lease_permissions,
    node_permissions,
    swarm_permissions,
)
from tools.devcluster.control_plane.api_level import ApiLevel

NEEDED = [each for each in (*swarm_permissions(), *lease_permissions()) if not each.optional]


def _has_line(operator: Operator, named: re.Pattern[str]) -> bool:
    return named.search(operator.text()) is not None


@pytest.fixture
def stage(api: ApiLevel, namespace: str, tmp_path: Path) -> Iterator[Scene]:
    with scene(api, namespace, tmp_path, "--resync", "2") as made:
        yield made
        made.operator.check_log()


@pytest.mark.full
def test_every_missing_right_is_named(api: ApiLevel, stage: Scene) -> None:
    grant(api, stage.namespace, without=[(need.resource, need.verb) for need in NEEDED])
    with stage.another_operator(elect=True) as operator:
        for need in NEEDED:
            named = re.compile(rf"\b{need.verb} {re.escape(need.resource)}[. ]")
            stage.wait(f"{need.verb} {need.resource}", partial(_has_line, operator, named))
        assert operator.running
        assert operator.probe("live")[0] == 200
        code, text = operator.probe("ready")
        assert code == 503
        assert all(need.resource in text for need in NEEDED)
        assert operator.metric("modelswarm_operator_missing_permissions") == len(NEEDED)


def test_operator_begins_when_a_missing_right_comes(api: ApiLevel, stage: Scene) -> None:
    grant(api, stage.namespace, without=[("pods", "create")])
    stage.apply(swarm())
    with stage.operator as operator:
        stage.wait("a word", lambda: "may not: create pods" in operator.text())
        time.sleep(2)
        assert stage.created_pods() == []
        grant(api, stage.namespace)
        stage.settle()
        stage.wait("the operator to be ready", operator.is_ready)


@pytest.mark.full
@pytest.mark.parametrize(
    "lacking", [*node_permissions(), *(each for each in swarm_permissions() if each.optional)]
)
def test_missing_optional_right_is_done_without(
    api: ApiLevel, stage: Scene, lacking: Permission
) -> None:
    grant(api, stage.namespace, without=[(lacking.resource, lacking.verb)])
    with stage.operator as operator:
        operator.wait_ready()
        stage.apply(swarm())
        stage.settle()
        assert f"may not: {lacking.verb} {lacking.resource}" in operator.text()
        assert operator.metric("modelswarm_operator_missing_permissions") == 0
        stage.check_invariants()


@pytest.mark.full
@pytest.mark.parametrize("resource", ["pods", "modelswarms", "services"])
def test_right_taken_away_while_running_is_named(
    api: ApiLevel, stage: Scene, resource: str
) -> None:
    with stage.operator as operator:
        operator.wait_ready()
        stage.apply(swarm())
        stage.settle()
        grant(api, stage.namespace, without=[(resource, "list")])
        stage.wait("not ready", lambda: operator.probe("ready")[0] == 503)
        stage.wait("its name", lambda: resource in operator.probe("ready")[1])
        assert operator.running
        assert operator.probe("live")[0] == 200
        grant(api, stage.namespace)
        stage.delete_pod(stage.live_pods()[0])
        stage.wait("a replacement", lambda: len(stage.created_pods()) == 5)
        stage.settle()
        operator.wait_ready()


@pytest.mark.full
def test_right_to_create_pods_lost_is_a_condition(api: ApiLevel, stage: Scene) -> None:
    with stage.operator as operator:
        operator.wait_ready()
        stage.apply(swarm(replicas=1))
        stage.settle(servers=2)
        grant(api, stage.namespace, without=[("pods", "create")])
        stage.delete_pod(stage.live_pods()[0])
        stage.wait("it", lambda: "cannot create" in stage.condition("Degraded").get("message", ""))
        grant(api, stage.namespace)
        stage.settle(servers=2)
