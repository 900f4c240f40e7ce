"""Rights that the operator lacks: it says which, waits, does not crash, and goes on when they come.

Case 29 of operator.md section 3. What the account gets here is `rights.needs`, the list that the chart is tested by.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.kubernetes.operator_process import Operator, grant
from support.kubernetes.operator_scene import Scene, scene, swarm

from modelswarm_operator.kube.access_review import Need, lease_needs, needs, node_needs
from tools.devcluster.control_plane.api_level import ApiLevel

NEEDED = [each for each in (*needs(), *lease_needs()) if not each.optional]


def _says(operator: Operator, what: str) -> bool:
    return what in operator.text()


@pytest.fixture
def stage(api: ApiLevel, namespace: str, tmp_path: Path) -> Iterator[Scene]:
    with scene(api, namespace, tmp_path, "--resync", "2") as made:
        yield made
        made.operator.check_log()


@pytest.mark.timeout(900)  # so many operators
def test_every_missing_right_is_named(api: ApiLevel, stage: Scene) -> None:
    """One after the other is taken away; a new process each time."""
    for need in NEEDED:
        grant(api, stage.namespace, without=[(need.resource, need.verb)])
        with stage.another(elect=True) as operator:
            told = f"may not: {need.verb} {need.resource}"
            stage.wait(told, partial(_says, operator, told))
            assert operator.running
            assert operator.probe("live")[0] == 200
            code, text = operator.probe("ready")
            assert code == 503
            assert need.resource in text
            assert operator.metric("modelswarm_operator_missing_rights") == 1
            operator.log.unlink()


def test_an_operator_without_rights_begins_when_they_come(api: ApiLevel, stage: Scene) -> None:
    grant(api, stage.namespace, without=[("pods", "create")])
    stage.apply(swarm())
    with stage.operator as operator:
        stage.wait("a word", lambda: "may not: create pods" in operator.text())
        time.sleep(2)
        assert stage.made() == []
        grant(api, stage.namespace)
        stage.settle()
        assert operator.is_ready()


@pytest.mark.parametrize("lacking", [*node_needs(), *(each for each in needs() if each.optional)])
def test_what_is_optional_is_done_without(api: ApiLevel, stage: Scene, lacking: Need) -> None:
    grant(api, stage.namespace, without=[(lacking.resource, lacking.verb)])
    with stage.operator as operator:
        operator.wait_ready()
        stage.apply(swarm())
        stage.settle()
        assert f"may not: {lacking.verb} {lacking.resource}" in operator.text()
        stage.check()


@pytest.mark.parametrize("resource", ["pods", "modelswarms", "services"])
def test_a_right_that_is_taken_away_while_it_runs(
    api: ApiLevel, stage: Scene, resource: str
) -> None:
    with stage.operator as operator:
        operator.wait_ready()
        stage.apply(swarm())
        stage.settle()
        grant(api, stage.namespace, without=[(resource, "list")])
        stage.wait("not ready", lambda: operator.probe("ready")[0] == 503)
        assert resource in operator.probe("ready")[1]
        assert operator.running
        assert operator.probe("live")[0] == 200
        grant(api, stage.namespace)
        stage.delete_pod(stage.live()[0])
        stage.wait("a replacement", lambda: len(stage.made()) == 5)
        stage.settle()
        operator.wait_ready()


def test_pods_that_may_no_longer_be_made_are_a_condition(api: ApiLevel, stage: Scene) -> None:
    with stage.operator as operator:
        operator.wait_ready()
        stage.apply(swarm(replicas=1))
        stage.settle(servers=2)
        grant(api, stage.namespace, without=[("pods", "create")])
        stage.delete_pod(stage.live()[0])
        stage.wait("it", lambda: "cannot create" in stage.condition("Degraded").get("message", ""))
        grant(api, stage.namespace)
        stage.settle(servers=2)
