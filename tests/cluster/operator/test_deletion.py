"""Deletion of a swarm, its namespace or its nodes, with Kubernetes' own garbage collection and eviction.

On kwok: a real controller manager and scheduler, pods without containers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.kubernetes.api_client import PODS, SWARMS
from support.kubernetes.operator_process import Operator
from support.kubernetes.operator_scene import Scene, SharedScene, swarm

from tools.devcluster.control_plane.api_level import ApiLevel
from tools.devcluster.control_plane.kwok import fake_node
from tools.devcluster.waiting import wait_for

pytestmark = pytest.mark.full

CHILDREN = (
    "/api/v1/namespaces/{}/services",
    "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    PODS,
)


@pytest.fixture(scope="module")
def shared_scene(
    kwok_api: ApiLevel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedScene]:
    kwok_api.kubectl.apply(fake_node("fake-0"), fake_node("fake-1"))
    with SharedScene(kwok_api, tmp_path_factory.mktemp("shared"), nodes=()) as shared:
        yield shared


@pytest.mark.parametrize("policy", ["Foreground", "Background"])
def test_deleted_swarm_takes_its_objects_along(stage: Scene, policy: str) -> None:
    stage.apply(swarm())
    stage.settle()
    made = len(stage.created_pods())
    stage.delete_swarm(propagationPolicy=policy)
    stage.wait_gone()
    for path in CHILDREN:
        where = path.format(stage.namespace)
        stage.wait(f"no {where}", lambda where=where: not stage.client.items(where))  # type: ignore[misc]
    assert len(stage.created_pods()) == made  # none was created again


def test_swarm_deleted_with_orphans_creates_nothing(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    made = len(stage.created_pods())
    stage.delete_swarm(propagationPolicy="Orphan")
    stage.wait("the swarm to go", lambda: stage.stored_swarm() is None)
    assert len(stage.created_pods()) == made


def test_namespace_with_a_swarm_can_be_deleted(kwok_api: ApiLevel, stage: Scene) -> None:
    """The operator runs outside the namespace, as in the chart: inside, its own rights would be deleted first."""
    config = kwok_api.user_kubeconfig("outside", "system:masters")
    with kwok_api.namespace() as other:
        operator = Operator(config, other, stage.folder, "--resync", "2")
        with operator:
            operator.wait_ready()
            stage.client.post(SWARMS.format(other), swarm())
            wait_for("pods", lambda: len(stage.client.items(PODS.format(other))) == 4, 60)
            kwok_api.kubectl("delete", "namespace", other, "--timeout=90s")
            assert stage.client.find(f"/api/v1/namespaces/{other}") is None
            assert operator.running
            operator.check_log()


def test_disruption_budget_refuses_an_eviction(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    doomed = stage.live_pods()[0]["metadata"]["name"]
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": doomed, "namespace": stage.namespace},
    }
    path = f"{PODS.format(stage.namespace)}/{doomed}/eviction"
    answer = stage.client.post_code(path, eviction)
    assert answer == 429  # no replica may be missing: a drain waits for the replacement
    stage.edit(replicas=3)
    stage.settle(servers=6)


def test_cordoned_node_loses_its_pods_without_a_gap(kwok_api: ApiLevel, stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    node = stage.live_pods()[0]["spec"]["nodeName"]
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


def test_pods_of_a_deleted_node_are_replaced(kwok_api: ApiLevel, stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    kwok_api.kubectl("delete", "node", "fake-1")
    try:
        stage.wait(
            "new pods elsewhere",
            lambda: (
                stage.is_settled()
                and all(pod["spec"].get("nodeName") == "fake-0" for pod in stage.live_pods())
            ),
        )
    finally:
        kwok_api.kubectl.apply(fake_node("fake-1"))
