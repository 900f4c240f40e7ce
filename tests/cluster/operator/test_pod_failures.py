"""Failures of pods and nodes, and the operator's reaction: crashes, evictions, missing images, lost nodes.

Cases 48 to 52 of CASES.md, at API level: the test acts as kubelet and node controller. tests/unit/operator tests the
rules themselves in virtual time; here they meet a real API server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime

import httpx
import pytest
from support.kubernetes.api_client import MERGE, PODS, Json
from support.kubernetes.fake_kubelet import (
    PENDING,
    READY,
    RUNNING,
    failed,
    make_node,
    running,
    set_node_ready,
    set_status,
)
from support.kubernetes.operator_process import Operator
from support.kubernetes.operator_scene import Scene, swarm

from tools.devcluster.control_plane.api_level import ApiLevel


@pytest.fixture
def stage(stage: Scene) -> Iterator[Scene]:
    """Yield the stage; at the end the nodes are Ready and schedulable again."""
    yield stage
    for name in ("node-a", "node-b"):
        uncordon(stage, name)
        set_node_ready(stage.client, name, True)


def uncordon(stage: Scene, name: str) -> None:
    stage.client.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": None, "taints": None}})


def names(pods: list[Json]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def test_failed_pod_is_replaced(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    good = stage.live_pods()
    set_status(stage.client, good[0], **failed("Evicted"))
    stage.wait("a replacement", lambda: len(stage.created_pods()) == 5)
    stage.settle()
    assert names(good[1:]) < names(stage.pods())  # good pods stay
    stage.check_invariants()


def test_pods_that_always_fail_are_replaced_ever_later(stage: Scene) -> None:
    """The first failure is repaired at once, the second after 2 s, the third after 4 s."""
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    created: dict[str, datetime] = {}  # pods of the first span, in order
    stage.wait("three replacements", lambda: len(fail_the_first_span(stage, created)) == 4)
    _, first, second, third = created.values()
    # The API server's times are whole seconds, and so is the operator's stored time.
    assert (second - first).total_seconds() >= 1
    assert (third - second).total_seconds() >= 3
    assert len(stage.created_pods()) == 5

    def is_reported() -> bool:
        fail_the_first_span(stage, created)  # the newest, too: else the swarm recovers
        degraded = stage.condition("Degraded")
        return degraded.get("status") == "True" and "weights are corrupt" in degraded["message"]

    stage.wait("the reason", is_reported)


def fail_the_first_span(stage: Scene, created: dict[str, datetime]) -> dict[str, datetime]:
    """Let pods of the first span fail as soon as they are bound. Add new ones to `created`, and return it."""
    for pod in stage.live_pods():
        meta = pod["metadata"]
        if pod["spec"].get("nodeName") and meta["labels"]["modelswarm.io/span"] == "0":
            created.setdefault(meta["name"], datetime.fromisoformat(meta["creationTimestamp"]))
            with suppress(httpx.HTTPStatusError):  # the operator replaces it at this moment
                set_status(stage.client, pod, **failed("Error", 1, "weights are corrupt"))
    return created


@pytest.mark.full
def test_container_that_cannot_start_is_a_condition(stage: Scene) -> None:
    stage.kubelet.target_state = lambda pod: PENDING
    stage.apply(swarm(replicas=1))
    pods = stage.wait("pods", lambda: len(stage.live_pods()) == 2 and stage.live_pods())
    stage.wait(
        "them to be bound", lambda: all(pod["spec"].get("nodeName") for pod in stage.live_pods())
    )
    waiting = {"reason": "ImagePullBackOff", "message": "no such thing: localhost/server:1"}
    for pod in pods:
        container = {
            "name": "server",
            "image": "localhost/server:1",
            "imageID": "",
            "ready": False,
            "restartCount": 4,
            "state": {"waiting": waiting},
            "lastState": {"terminated": {"exitCode": 1, "message": waiting["message"]}},
        }
        set_status(stage.client, pod, phase="Pending", containerStatuses=[container])
    stage.wait("it", lambda: "no such thing" in str(stage.condition("Degraded")))
    time.sleep(3)
    assert names(stage.live_pods()) == names(pods)
    stage.kubelet.target_state = lambda pod: READY
    stage.settle(servers=2)


@pytest.mark.full
def test_pod_that_does_not_end_delays_nothing(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    stage.kubelet.ends_pod = lambda pod: False
    stuck = stage.live_pods()[0]["metadata"]["name"]
    stage.delete_pod(stuck)
    stage.wait(
        "a full house", lambda: stage.status()["coverage"] == 2 and len(stage.live_pods()) == 4
    )
    assert stuck in names(stage.pods())
    assert len(stage.created_pods()) == 5
    stage.kubelet.ends_pod = lambda pod: True
    stage.settle()


@pytest.mark.full
def test_flapping_readiness_costs_no_pod(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    before, flapping = names(stage.live_pods()), stage.live_pods()[0]["metadata"]["name"]
    for turn in range(8):
        fate = RUNNING if turn % 2 else READY
        stage.kubelet.target_state = lambda pod, fate=fate: (  # type: ignore[misc]
            fate if pod["metadata"]["name"] == flapping else READY
        )
        time.sleep(0.5)
    stage.kubelet.target_state = lambda pod: READY
    stage.settle()
    assert names(stage.live_pods()) == before


@pytest.mark.full
def test_pods_of_an_unready_node_are_replaced_elsewhere(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    lost = [pod for pod in stage.live_pods() if pod["spec"]["nodeName"] == "node-a"]
    assert lost
    make_node(stage.client, "node-c")
    stage.kubelet.nodes = ("node-b", "node-c")
    set_node_ready(stage.client, "node-a", False)
    stage.wait(
        "new pods for those on it",
        lambda: len(stage.created_pods()) == 4 + len(lost) and stage.status()["coverage"] == 2,
    )
    time.sleep(3)
    assert len(stage.created_pods()) == 4 + len(lost)


def test_cordon_starts_replacements_before_pods_go(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    doomed = [pod for pod in stage.live_pods() if pod["spec"]["nodeName"] == "node-a"]
    least = [len(stage.live_pods())]
    stage.client.patch("/api/v1/nodes/node-a", {"spec": {"unschedulable": True}})

    def moved() -> bool:
        least.append(stage.status()["coverage"])
        return not names(doomed) & names(stage.live_pods()) and stage.is_settled()

    stage.wait("the pods to have moved", moved)
    assert min(least) == 2  # no span ever had fewer servers than specified
    stage.check_invariants()


@pytest.mark.full
def test_kept_pod_stays_and_its_slot_is_refilled(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    kept = stage.live_pods()[0]["metadata"]["name"]
    path = f"{PODS.format(stage.namespace)}/{kept}"
    stage.client.patch(path, {"metadata": {"annotations": {"modelswarm.io/keep": "true"}}}, MERGE)
    stage.wait("a pod for the slot", lambda: len(stage.created_pods()) == 3)
    stage.wait("it to be ready", lambda: stage.status()["coverage"] == 1)
    stage.check_quiet(4.0)
    assert stage.client.find(path) is not None


@pytest.mark.full
def test_protected_swarm_is_not_deleted(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    stage.annotate("counting", protect="true")
    stage.delete_swarm()
    time.sleep(3)
    assert len(stage.live_pods()) == 2
    assert "protect" in str(stage.status()["conditions"])
    stage.annotate("counting", protect=None)
    stage.wait_gone()


@pytest.mark.full
def test_invalid_split_is_a_condition_and_good_pods_stay(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    before = names(stage.live_pods())
    stage.edit(spans={"count": None, "ranges": [{"first": 0, "last": 500}]})
    stage.wait("it", lambda: stage.condition("Degraded").get("status") == "True")
    assert "8" in stage.condition("Degraded")["message"]
    assert names(stage.live_pods()) == before
    stage.edit(spans={"count": 2, "ranges": None})
    stage.settle(servers=2)
    assert names(stage.live_pods()) == before


@pytest.mark.full
def test_pods_refused_by_pod_security_are_a_condition(stage: Scene) -> None:
    careless = {"spec": {"hostNetwork": True}}
    stage.apply(swarm(replicas=1, pools=[{"name": "main", "podTemplate": careless}]))
    stage.wait("it", lambda: "PodSecurity" in str(stage.status().get("conditions")))
    assert stage.created_pods() == []
    stage.edit(pools=[{"name": "main"}])
    stage.settle(servers=2)


@pytest.mark.full
def test_same_served_name_in_two_namespaces_is_refused(api: ApiLevel, fresh_stage: Scene) -> None:
    """The newer swarm gets the condition that its served name is taken; after a rename it is served."""
    with api.namespace() as other:
        config = api.user_kubeconfig("operator", "system:masters")
        fresh_stage.operator.stop()
        operator = Operator(
            config, fresh_stage.namespace, fresh_stage.folder, "--namespace", other, "--resync", "2"
        )
        with operator:
            operator.wait_ready()
            fresh_stage.apply(swarm(replicas=1))
            fresh_stage.settle(servers=2)
            path = f"/apis/modelswarm.io/v1alpha1/namespaces/{other}/modelswarms"
            fresh_stage.client.post(path, swarm(replicas=1))
            problems = fresh_stage.wait(
                "it",
                lambda: (
                    f"{fresh_stage.namespace}/counting"
                    in str(
                        (fresh_stage.client.get(f"{path}/counting").get("status") or {}).get(
                            "conditions"
                        )
                    )
                ),
            )
            assert problems
            fresh_stage.client.delete(f"{path}/counting")
            fresh_stage.wait(
                "it to go", lambda: fresh_stage.client.find(f"{path}/counting") is None
            )
            model = {"source": "demo://counting", "servedName": "another"}
            fresh_stage.client.post(path, swarm(replicas=1, model=model))
            fresh_stage.wait(
                "its pods", lambda: len(fresh_stage.client.items(PODS.format(other))) == 2
            )
            fresh_stage.settle(servers=2)
            operator.check_log()


@pytest.mark.full
def test_swarm_with_large_annotations_is_served(stage: Scene) -> None:
    document = swarm(replicas=1)
    document["metadata"]["annotations"] = {"big": "x" * 250_000}
    stage.apply(document)
    stage.settle(servers=2)
    stage.check_quiet(3.0)


@pytest.mark.full
def test_restarted_container_is_counted_again(stage: Scene) -> None:
    """The kubelet restarts the container; the operator changes nothing."""
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    pod = stage.live_pods()[0]
    stage.kubelet.target_state = lambda each: PENDING
    set_status(stage.client, pod, **running(False, restarts=1))
    stage.wait("coverage to fall", lambda: stage.status()["coverage"] == 0)
    stage.kubelet.target_state = lambda each: READY
    stage.settle(servers=2)
    assert len(stage.created_pods()) == 2
