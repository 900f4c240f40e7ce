"""Deleting a swarm, its namespace or its nodes, with Kubernetes' own controllers at work: garbage collection, eviction.

Cases 41, 42 and 49 of operator.md section 3, on kwok: real controller manager and scheduler, pods without containers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kubernetes.api_client import PODS, SWARMS
from support.kubernetes.operator_process import Operator
from support.kubernetes.operator_scene import Scene, scene, swarm

from tools.devcluster.control_plane.api_level import ApiLevel
from tools.devcluster.control_plane.kwok import fake_node
from tools.devcluster.waiting import wait_for

CHILDREN = (
    "/api/v1/namespaces/{}/services",
    "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    PODS,
)


@pytest.fixture
def stage(kwok_api: ApiLevel, namespace: str, tmp_path: Path) -> Iterator[Scene]:
    kwok_api.kubectl.apply(fake_node("fake-0"), fake_node("fake-1"))
    with (
        scene(kwok_api, namespace, tmp_path, "--resync", "2", nodes=()) as made,
        made.operator,
    ):
        made.operator.wait_ready()
        yield made
        made.operator.check_log()


@pytest.mark.parametrize("policy", ["Foreground", "Background"])
def test_a_deleted_swarm_takes_everything_along(stage: Scene, policy: str) -> None:
    stage.apply(swarm())
    stage.settle()
    made = len(stage.made())
    stage.remove(propagationPolicy=policy)
    stage.gone()
    for path in CHILDREN:
        where = path.format(stage.namespace)
        stage.wait(f"no {where}", lambda where=where: not stage.plain.items(where))  # type: ignore[misc]
    assert len(stage.made()) == made  # nothing was made again while it went


def test_a_swarm_that_leaves_orphans_goes_and_makes_nothing_again(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    made = len(stage.made())
    stage.remove(propagationPolicy="Orphan")
    stage.wait("the swarm to go", lambda: stage.stored() is None)
    assert len(stage.made()) == made


def test_a_namespace_that_is_deleted_goes(kwok_api: ApiLevel, stage: Scene) -> None:
    """The operator lives elsewhere, as the chart has it: in the namespace, its own rights would go first."""
    config = kwok_api.user_kubeconfig("outside", "system:masters")
    stage.operator.stop()
    with kwok_api.namespace() as other:
        operator = Operator(config, other, stage.folder, "--resync", "2")
        with operator:
            operator.wait_ready()
            stage.plain.post(SWARMS.format(other), swarm())
            wait_for("pods", lambda: len(stage.plain.items(PODS.format(other))) == 4, 60)
            kwok_api.kubectl("delete", "namespace", other, "--timeout=90s")
            assert stage.plain.find(f"/api/v1/namespaces/{other}") is None
            assert operator.running
            operator.check_log()


def test_an_evicted_pod_is_replaced_and_the_budget_holds(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    doomed = stage.live()[0]["metadata"]["name"]
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": doomed, "namespace": stage.namespace},
    }
    path = f"{PODS.format(stage.namespace)}/{doomed}/eviction"
    answer = stage.plain.try_post(path, eviction)
    assert answer == 429  # every replica is wanted: a drain waits for the replacement
    stage.edit(replicas=3)
    stage.settle(servers=6)


def test_draining_a_node_moves_its_pods_without_a_gap(kwok_api: ApiLevel, stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    node = stage.live()[0]["spec"]["nodeName"]
    kwok_api.kubectl("cordon", node)
    try:
        low = [1]

        def moved() -> bool:
            low.append(stage.status()["coverage"])
            return all(pod["spec"].get("nodeName") != node for pod in stage.pods())

        stage.wait("the pods to have moved", moved)
        stage.settle(servers=2)
        assert min(low) == 1
    finally:
        kwok_api.kubectl("uncordon", node)


def test_a_node_that_is_deleted_has_its_pods_replaced(kwok_api: ApiLevel, stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    kwok_api.kubectl("delete", "node", "fake-1")
    try:
        stage.wait(
            "new pods elsewhere",
            lambda: (
                stage.is_settled()
                and all(pod["spec"].get("nodeName") == "fake-0" for pod in stage.live())
            ),
        )
    finally:
        kwok_api.kubectl.apply(fake_node("fake-1"))
