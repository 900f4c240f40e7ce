"""What befalls pods and nodes: crashes, evictions, images that are not there, nodes that go; and what is done about it.

Cases 48 to 52 of operator.md section 3, at API level: the test plays kubelet and node controller. The rules themselves
are tested in virtual time (tests/unit/test_operator_*.py); here they meet a real API server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
from support.kubernetes.operator_scene import Scene, scene, swarm

from tools.devcluster.control_plane.api_level import ApiLevel


@pytest.fixture
def stage(api: ApiLevel, namespace: str, tmp_path: Path) -> Iterator[Scene]:
    with scene(api, namespace, tmp_path, "--resync", "2") as made, made.operator:
        made.operator.wait_ready()
        yield made
        for name in ("node-a", "node-b"):
            uncordon(made, name)
            set_node_ready(made.plain, name, True)
        made.operator.check_log()


def uncordon(stage: Scene, name: str) -> None:
    stage.plain.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": None, "taints": None}})


def names(pods: list[Json]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


@pytest.mark.parametrize(
    ("reason", "code"), [("Evicted", 1), ("OOMKilled", 137), ("Error", 1), ("Preempting", 143)]
)
def test_a_pod_that_has_failed_is_replaced(stage: Scene, reason: str, code: int) -> None:
    stage.apply(swarm())
    stage.settle()
    good = stage.live()
    set_status(stage.plain, good[0], **failed(reason, code))
    stage.wait("a replacement", lambda: len(stage.made()) == 5)
    stage.settle()
    assert names(good[1:]) < names(stage.pods())  # good pods are never touched
    stage.check()


def test_pods_that_always_fail_make_no_storm(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    ends = time.monotonic() + 15
    while time.monotonic() < ends:
        fail_the_first_span(stage)
        time.sleep(0.2)
    assert len(stage.made()) <= 2 + 5  # at once, then after 2, 4, 8 seconds

    def told() -> bool:
        fail_the_first_span(stage)  # the one that was just made, too: else it would be well
        degraded = stage.condition("Degraded")
        return degraded.get("status") == "True" and "weights are corrupt" in degraded["message"]

    stage.wait("the reason", told, 30)


def fail_the_first_span(stage: Scene) -> None:
    for pod in stage.live():
        bound = pod["spec"].get("nodeName")
        if bound and pod["metadata"]["labels"]["modelswarm.io/span"] == "0":
            with suppress(httpx.HTTPStatusError):  # it is replaced at this moment
                set_status(stage.plain, pod, **failed("Error", 1, "weights are corrupt"))


@pytest.mark.parametrize(
    "reason", ["ImagePullBackOff", "CrashLoopBackOff", "CreateContainerConfigError"]
)
def test_a_container_that_waits_in_vain_is_a_condition_and_the_pod_stays(
    stage: Scene, reason: str
) -> None:
    stage.kubelet.fate = lambda pod: PENDING
    stage.apply(swarm(replicas=1))
    pods = stage.wait("pods", lambda: len(stage.live()) == 2 and stage.live())
    stage.wait("them to be bound", lambda: all(pod["spec"].get("nodeName") for pod in stage.live()))
    waiting = {"reason": reason, "message": "no such thing: localhost/server:1"}
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
        set_status(stage.plain, pod, phase="Pending", containerStatuses=[container])
    stage.wait("it", lambda: "no such thing" in str(stage.condition("Degraded")))
    time.sleep(3)
    assert names(stage.live()) == names(pods)
    stage.kubelet.fate = lambda pod: READY
    stage.settle(servers=2)


def test_a_pod_that_does_not_end_holds_nothing_up(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    stage.kubelet.lets_go = lambda pod: False
    stuck = stage.live()[0]["metadata"]["name"]
    stage.delete_pod(stuck)
    stage.wait("a full house", lambda: stage.status()["coverage"] == 2 and len(stage.live()) == 4)
    assert stuck in names(stage.pods())
    assert len(stage.made()) == 5
    stage.kubelet.lets_go = lambda pod: True
    stage.settle()


def test_readiness_that_flaps_costs_no_pod(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    before, flapping = names(stage.live()), stage.live()[0]["metadata"]["name"]
    for turn in range(8):
        fate = RUNNING if turn % 2 else READY
        stage.kubelet.fate = lambda pod, fate=fate: (  # type: ignore[misc]
            fate if pod["metadata"]["name"] == flapping else READY
        )
        time.sleep(0.5)
    stage.kubelet.fate = lambda pod: READY
    stage.settle()
    assert names(stage.live()) == before


def test_pods_of_a_node_that_is_not_ready_are_replaced_elsewhere(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    lost = [pod for pod in stage.live() if pod["spec"]["nodeName"] == "node-a"]
    assert lost
    make_node(stage.plain, "node-c")
    stage.kubelet.nodes = ("node-b", "node-c")
    set_node_ready(stage.plain, "node-a", False)
    stage.wait(
        "new pods for those on it",
        lambda: len(stage.made()) == 4 + len(lost) and stage.status()["coverage"] == 2,
    )
    time.sleep(3)
    assert len(stage.made()) == 4 + len(lost)


def test_a_cordon_starts_the_replacement_before_the_pod_goes(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    doomed = [pod for pod in stage.live() if pod["spec"]["nodeName"] == "node-a"]
    least = [len(stage.live())]
    stage.plain.patch("/api/v1/nodes/node-a", {"spec": {"unschedulable": True}})

    def moved() -> bool:
        least.append(stage.status()["coverage"])
        return not names(doomed) & names(stage.live()) and stage.is_settled()

    stage.wait("the pods to have moved", moved)
    assert min(least) == 2  # no span ever had less than it wants
    stage.check()


def test_a_pod_that_a_person_keeps_is_left_alone_and_its_slot_refilled(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    kept = stage.live()[0]["metadata"]["name"]
    path = f"{PODS.format(stage.namespace)}/{kept}"
    stage.plain.patch(path, {"metadata": {"annotations": {"modelswarm.io/keep": "true"}}}, MERGE)
    stage.wait("a pod for the slot", lambda: len(stage.made()) == 3)
    stage.wait("it to be ready", lambda: stage.status()["coverage"] == 1)
    stage.check_quiet(4.0)
    assert stage.plain.find(path) is not None


def test_a_protected_swarm_is_not_deleted(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    stage.annotate("counting", protect="true")
    stage.remove()
    time.sleep(3)
    assert len(stage.live()) == 2
    assert "protect" in str(stage.status()["conditions"])
    stage.annotate("counting", protect=None)
    stage.gone()


def test_an_invalid_split_is_a_condition_and_good_pods_stay(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    before = names(stage.live())
    stage.edit(spans={"count": None, "ranges": [{"first": 0, "last": 500}]})
    stage.wait("it", lambda: stage.condition("Degraded").get("status") == "True")
    assert "8" in stage.condition("Degraded")["message"]
    assert names(stage.live()) == before
    stage.edit(spans={"count": 2, "ranges": None})
    stage.settle(servers=2)
    assert names(stage.live()) == before


def test_pods_that_pod_security_refuses_are_a_condition(stage: Scene) -> None:
    careless = {"spec": {"hostNetwork": True}}
    stage.apply(swarm(replicas=1, pools=[{"name": "main", "podTemplate": careless}]))
    stage.wait("it", lambda: "PodSecurity" in str(stage.status().get("conditions")))
    assert stage.made() == []
    stage.edit(pools=[{"name": "main"}])
    stage.settle(servers=2)


def test_two_swarms_of_one_name_in_two_namespaces(api: ApiLevel, stage: Scene) -> None:
    """The younger one is told that the served name is taken; a name of its own helps. Neither touches the other."""
    with api.namespace() as other:
        config = api.user_kubeconfig("operator", "system:masters")
        stage.operator.stop()
        operator = Operator(
            config, stage.namespace, stage.folder, "--namespace", other, "--resync", "2"
        )
        with operator:
            operator.wait_ready()
            stage.apply(swarm(replicas=1))
            stage.settle(servers=2)
            path = f"/apis/modelswarm.io/v1alpha1/namespaces/{other}/modelswarms"
            stage.plain.post(path, swarm(replicas=1))
            told = stage.wait(
                "it",
                lambda: (
                    f"{stage.namespace}/counting"
                    in str(
                        (stage.plain.get(f"{path}/counting").get("status") or {}).get("conditions")
                    )
                ),
            )
            assert told
            stage.plain.delete(f"{path}/counting")
            stage.wait("it to go", lambda: stage.plain.find(f"{path}/counting") is None)
            model = {"source": "demo://counting", "servedName": "another"}
            stage.plain.post(path, swarm(replicas=1, model=model))
            stage.wait("its pods", lambda: len(stage.plain.items(PODS.format(other))) == 2)
            stage.settle(servers=2)
            operator.check_log()


def test_a_swarm_with_a_quarter_mebibyte_of_annotations(stage: Scene) -> None:
    document = swarm(replicas=1)
    document["metadata"]["annotations"] = {"big": "x" * 250_000}
    stage.apply(document)
    stage.settle(servers=2)
    stage.check_quiet(3.0)


def test_a_running_container_of_a_pod_is_seen_again_after_a_restart(stage: Scene) -> None:
    """The kubelet restarts containers; the operator only watches while they come back."""
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    pod = stage.live()[0]
    stage.kubelet.fate = lambda each: PENDING
    set_status(stage.plain, pod, **running(False, restarts=1))
    stage.wait("coverage to fall", lambda: stage.status()["coverage"] == 0)
    stage.kubelet.fate = lambda each: READY
    stage.settle(servers=2)
    assert len(stage.made()) == 2
