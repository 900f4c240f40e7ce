"""Resources, priorities and GPUs of nodes, with Kubernetes' own scheduler and controllers on kwok.

Preemption by a pod of higher priority, GPUs that disappear from a node.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.kubernetes.api_client import PODS
from support.kubernetes.operator_scene import Scene, SharedScene, swarm

from tools.devcluster.control_plane.api_level import ApiLevel
from tools.devcluster.control_plane.kwok import GPU, fake_node

pytestmark = pytest.mark.full

ZONE = "topology.kubernetes.io/zone"
DEVICE_MEMORY = "nvidia.com/gpu.memory"  # MiB, as GPU feature discovery labels a node
NODES = ("fake-a", "fake-b")


@pytest.fixture(scope="module")
def shared_scene(
    kwok_api: ApiLevel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedScene]:
    with SharedScene(kwok_api, tmp_path_factory.mktemp("shared"), nodes=()) as shared:
        yield shared


@pytest.fixture
def stage(kwok_api: ApiLevel, stage: Scene) -> Iterator[Scene]:
    """Yield two nodes for this test: 8 CPUs, 2 GPUs, a zone."""
    for name in NODES:
        labels = {
            ZONE: f"zone-of-{name}",
            "test": stage.namespace,
            DEVICE_MEMORY: "81559",
        }
        kwok_api.kubectl.apply(fake_node(name, cpu="8", gpus=2, labels=labels))
    try:
        yield stage
        stage.delete_swarm()
        stage.wait_gone()
    finally:
        for name in NODES:
            kwok_api.kubectl("delete", "node", name)


def pool(stage: Scene, resources: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a pool on this test's nodes."""
    template = {"spec": {"nodeSelector": {"test": stage.namespace}}}
    return [{"name": "a", "resources": resources, "podTemplate": template}]


def reason(stage: Scene) -> str:
    return str(stage.condition("Degraded").get("reason"))


def test_server_gets_the_zone_of_its_node(stage: Scene) -> None:
    stage.apply(swarm(pools=pool(stage, {"requests": {"cpu": "1"}})))
    stage.settle()
    for pod in stage.live_pods():
        (container,) = pod["spec"]["containers"]
        (zone,) = (each for each in container["env"] if each["name"] == "NODE_ZONE")
        assert zone["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{ZONE}']"
        assert pod["metadata"]["labels"][ZONE] == f"zone-of-{pod['spec']['nodeName']}"
    stage.check_quiet(3.0)  # the kubelet's label causes no write


def test_preempted_pod_waits_for_room_and_others_stay(stage: Scene) -> None:
    stage.apply(swarm(pools=pool(stage, {"requests": {"cpu": "3"}})))
    stage.settle()
    before = {pod["metadata"]["uid"] for pod in stage.live_pods()}
    importance = f"important-{stage.namespace}"
    meta = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
    stage.level.kubectl.apply({**meta, "metadata": {"name": importance}, "value": 1000})
    try:
        stage.client.post(PODS.format(stage.namespace), important(stage.namespace, importance))
        stage.wait("a successor without room", lambda: reason(stage) == "NoCapacity")
        assert "cpu" in stage.condition("Degraded")["message"].lower()
        assert len({pod["metadata"]["uid"] for pod in stage.live_pods()} & before) == 3
        stage.delete_pod("important")
        stage.settle()
    finally:
        stage.level.kubectl("delete", "priorityclass", importance)


def important(namespace: str, importance: str) -> dict[str, Any]:
    """Return a pod that fits on no node beside two servers."""
    container = {
        "name": "c",
        "image": "none",
        "resources": {"requests": {"cpu": "4"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    spec = {
        "priorityClassName": importance,
        "nodeSelector": {"test": namespace},
        "containers": [container],
    }
    return {"metadata": {"name": "important"}, "spec": spec}


def test_lost_gpus_are_a_condition_and_running_pods_stay(stage: Scene) -> None:
    stage.apply(swarm(pools=pool(stage, {"limits": {GPU: 1}})))
    stage.settle()
    lost, *others = stage.live_pods()
    for node in NODES:
        give_gpus(stage, node, 0)
    stage.delete_pod(lost)
    stage.wait("a successor without a GPU", lambda: reason(stage) == "NoCapacity")
    assert GPU in stage.condition("Degraded")["message"]
    live = {pod["metadata"]["uid"] for pod in stage.live_pods()}
    assert {pod["metadata"]["uid"] for pod in others} <= live
    assert stage.condition("Ready")["status"] == "True"
    for node in NODES:
        give_gpus(stage, node, 2)
    stage.settle()


def give_gpus(stage: Scene, node: str, count: int) -> None:
    amounts = {GPU: str(count)}
    status = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
    stage.level.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", status)
