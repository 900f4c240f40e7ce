"""The operator against a real API server: it creates the pods of a swarm, and repairs manual changes.

Pods exist only in the API; a thread acts as scheduler and kubelet. Other files test faults.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from support.kubernetes.api_client import PODS, SWARMS
from support.kubernetes.fake_kubelet import PENDING, READY, UNBOUND, running, set_status
from support.kubernetes.operator_scene import Scene, swarm
from support.operator.probe_answers import serve_json

from modelswarm_operator.reconcile.manifests.manifests import METRICS_PORT

LONG_AGO = "2026-01-01T00:00:00Z"


def test_swarm_becomes_pods_service_budgets_and_status(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    stage.wait_quiet()
    end = stage.end_state()
    assert [slot for slot, *_ in end["pods"]] == ["0-0", "0-1", "1-0", "1-1"]
    assert [name for name, _ in end["services"]] == ["counting-servers"]
    assert end["budgets"] == [("counting-s0", 2), ("counting-s1", 2)]
    assert stage.status()["coverage"] == 2
    stage.check_invariants()


@pytest.mark.full
def test_settled_swarm_causes_no_write(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    stage.check_quiet(6.0)
    stage.check_invariants()


@pytest.mark.full
def test_deleted_pod_is_replaced_under_a_new_name(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    lost = stage.live_pods()[0]["metadata"]
    stage.delete_pod(lost["name"])
    stage.wait(
        "the replacement",
        lambda: lost["uid"] not in {pod["metadata"]["uid"] for pod in stage.live_pods()},
    )
    stage.settle()
    assert lost["name"] not in {pod["metadata"]["name"] for pod in stage.pods()}
    assert len(stage.created_pods()) == 5
    stage.check_invariants()


@pytest.mark.full
def test_deleted_swarm_leaves_no_pod(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    stage.delete_swarm()
    stage.wait_gone()
    stage.operator.check_log()


def test_scaling_up_and_down_never_reuses_a_pod_name(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    names = {pod["metadata"]["name"] for pod in stage.pods()}
    for replicas in (3, 2, 3):
        stage.edit(replicas=replicas)
        stage.settle(servers=2 * replicas)
        names |= {pod["metadata"]["name"] for pod in stage.pods()}
        stage.check_invariants()
    assert len(names) == len(stage.created_pods()) == 8  # 2, then 4 more, 2 deleted, 2 new ones


@pytest.mark.full
def test_zero_replicas_suspend_a_swarm(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    stage.edit(replicas=0)
    stage.wait("no pods", lambda: not stage.pods())
    stage.edit(replicas=1)
    stage.settle(servers=2)
    stage.check_invariants()


def test_last_of_many_edits_counts(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    for turn in range(50):
        stage.edit(replicas=1 + turn % 3)
    stage.edit(replicas=2)
    stage.settle()
    stage.wait_quiet()
    stage.check_quiet(3.0)
    stage.check_invariants()


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/namespaces/{}/services/counting-servers",
        "/apis/policy/v1/namespaces/{}/poddisruptionbudgets/counting-s1",
    ],
)
def test_owned_object_deleted_by_hand_comes_back(stage: Scene, path: str) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    where = path.format(stage.namespace)
    old = stage.client.get(where)["metadata"]["uid"]
    stage.client.delete(where)
    new = stage.wait("the child", lambda: stage.client.find(where))
    assert new["metadata"]["uid"] != old


@pytest.mark.full
def test_owned_object_edited_by_hand_is_put_right(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    path = f"/apis/policy/v1/namespaces/{stage.namespace}/poddisruptionbudgets/counting-s0"
    stage.client.patch(path, {"spec": {"minAvailable": 0}})
    stage.wait("it", lambda: stage.client.get(path)["spec"]["minAvailable"] == 2)


@pytest.mark.full
def test_pod_without_an_owner_is_released_and_replaced(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    released = stage.live_pods()[0]["metadata"]["name"]
    path = f"{PODS.format(stage.namespace)}/{released}"
    stage.client.patch(path, {"metadata": {"ownerReferences": None}})
    stage.wait("one more pod", lambda: len(stage.live_pods()) == 3)
    stage.wait("it to be ready", lambda: stage.status()["coverage"] == 1)
    assert stage.client.find(path) is not None
    stage.check_quiet(3.0)


def test_foreign_pod_with_server_labels_is_left_alone(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    stage.wait_quiet()
    foreign = stage.live_pods()[0]
    meta = {"name": "foreign", "labels": foreign["metadata"]["labels"]}
    spec = {key: foreign["spec"][key] for key in ("containers", "securityContext", "volumes")}
    stage.client.post(
        PODS.format(stage.namespace),
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec},
    )
    stage.check_quiet(4.0)
    assert stage.client.find(f"{PODS.format(stage.namespace)}/foreign") is not None


def test_finalizer_removed_by_hand_comes_back(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    path = f"{SWARMS.format(stage.namespace)}/counting"
    stage.client.patch(path, {"metadata": {"finalizers": []}})
    stage.wait("it", lambda: stage.client.get(path)["metadata"].get("finalizers"))


@pytest.mark.full
def test_full_quota_is_a_condition_until_there_is_room(stage: Scene) -> None:
    quotas = f"/api/v1/namespaces/{stage.namespace}/resourcequotas"
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "pods"},
        "spec": {"hard": {"pods": "3"}},
    }
    stage.client.post(quotas, quota)
    stage.client.patch(
        f"{quotas}/pods/status", {"status": {"hard": {"pods": "3"}, "used": {"pods": "0"}}}
    )
    stage.apply(swarm())
    stage.wait("the condition", lambda: "quota" in stage.condition("Degraded").get("message", ""))
    assert stage.condition("Degraded")["status"] == "True"
    tried = len(stage.writes())
    stage.client.delete(f"{quotas}/pods")
    stage.settle()
    assert len(stage.writes()) - tried < 30
    stage.check_invariants()


@pytest.mark.full
def test_unschedulable_pod_is_kept_and_explained(stage: Scene) -> None:
    stage.kubelet.target_state = lambda pod: UNBOUND
    stage.apply(swarm(replicas=1))
    pods = stage.wait("pods", lambda: len(stage.live_pods()) == 2 and stage.live_pods())
    why = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": why,
    }
    for pod in pods:
        path = f"{PODS.format(stage.namespace)}/{pod['metadata']['name']}/status"
        stage.client.patch(path, {"status": {"conditions": [condition]}})
    stage.wait("the reason", lambda: "(1 more like this)" in str(stage.status()["conditions"]))
    assert "nvidia.com/gpu" in str(stage.status()["conditions"])
    stage.check_quiet(3.0)
    assert {pod["metadata"]["uid"] for pod in pods} == {
        pod["metadata"]["uid"] for pod in stage.live_pods()
    }


@pytest.mark.full
def test_recreated_swarm_has_only_its_own_pods(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    old = (stage.stored_swarm() or {})["metadata"]["uid"]
    stage.delete_swarm()
    stage.wait("the old one to go", lambda: stage.stored_swarm() is None)
    stage.apply(swarm())
    stage.settle()
    owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in stage.pods()}
    assert len(owners) == 1
    assert old not in owners


@pytest.mark.full
def test_operator_started_after_a_stop_writes_nothing(fresh_stage: Scene) -> None:
    fresh_stage.apply(swarm())
    fresh_stage.settle()
    fresh_stage.wait_quiet()
    assert fresh_stage.operator.stop() == 0
    before = fresh_stage.end_state()
    fresh_stage.operator.start().wait_ready()
    fresh_stage.check_quiet(3.0)
    assert fresh_stage.end_state() == before


@pytest.mark.full
def test_probes_and_metrics_show_a_settled_swarm(fresh_stage: Scene) -> None:
    fresh_stage.apply(swarm())
    fresh_stage.settle()
    operator = fresh_stage.operator
    assert operator.probe("live")[0] == operator.probe("ready")[0] == 200
    for wanted, name, labels in (
        (4, "pods", {"state": "ready"}),
        (1, "swarms", {"condition": "Ready", "status": "True"}),
        (4, "pods_created_total", {"role": "server"}),
        (0, "reconcile_seconds_count", {"result": "fault"}),
        (1, "leader", {}),
    ):
        metric = partial(operator.metric, f"modelswarm_operator_{name}", **labels)
        fresh_stage.wait(f"{name} to be {wanted}", partial(is_value, metric, wanted))


def is_value(metric: Callable[[], float], wanted: float) -> bool:
    return metric() == wanted


@pytest.mark.full
def test_stop_while_waiting_for_the_api_server_is_obeyed(fresh_stage: Scene) -> None:
    operator = fresh_stage.operator
    operator.stop()
    fresh_stage.proxy.upstream = "https://127.0.0.1:1"
    operator.start()
    fresh_stage.wait("its port", lambda: operator.probe("live")[0] == 200)
    assert operator.probe("ready")[0] == 503
    assert operator.stop() == 0


def message_has(stage: Scene, kind: str, words: str) -> bool:
    return words in stage.condition(kind).get("message", "")


def test_condition_says_what_a_start_waits_for(stage: Scene) -> None:
    body = {"status": "starting", "phase": "reading weights", "done": 3 << 29, "total": 4 << 30}
    stage.kubelet.target_state = lambda pod: PENDING
    stage.apply(swarm(spans={"count": 1}, replicas=1))
    stage.wait("the pod", stage.live_pods)
    (pod,) = stage.live_pods()
    with serve_json(body, METRICS_PORT) as address:
        status = running(False)
        status["containerStatuses"][0]["state"] = {"running": {"startedAt": LONG_AGO}}
        set_status(stage.client, pod, **status | {"podIP": address, "podIPs": [{"ip": address}]})
        words = f"{pod['metadata']['name']}: reading weights, 1.5 of 4.0 GiB."
        for kind in ("Ready", "Progressing"):
            stage.wait(kind, partial(message_has, stage, kind, words))
        assert stage.condition("Ready")["reason"] == "Starting"
    stage.kubelet.target_state = lambda pod: READY
    stage.settle(servers=1)
    assert "reading weights" not in str(stage.status()["conditions"])
    stage.check_invariants()
