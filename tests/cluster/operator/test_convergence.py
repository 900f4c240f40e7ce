"""The operator against a real API server: what is applied comes to be, and what is broken by hand is put right.

Pods exist at the API only; a thread plays scheduler and kubelet. Faults have files of their own.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from support.kubernetes.api_client import PODS, SWARMS
from support.kubernetes.fake_kubelet import UNBOUND
from support.kubernetes.operator_scene import Scene, swarm


def test_a_swarm_becomes_pods_a_service_budgets_and_a_status(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    end = stage.end_state()
    assert [slot for slot, *_ in end["pods"]] == ["0-0", "0-1", "1-0", "1-1"]
    assert [name for name, _ in end["services"]] == ["counting-servers"]
    assert end["budgets"] == [("counting-s0", 2), ("counting-s1", 2)]
    assert stage.status()["coverage"] == 2
    stage.check()


def test_nothing_is_written_while_all_is_well(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    stage.check_quiet(6.0)
    stage.check()


def test_a_deleted_pod_is_replaced_under_a_new_name(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    lost = stage.live()[0]["metadata"]
    stage.delete_pod(lost["name"])
    stage.wait(
        "the replacement",
        lambda: lost["uid"] not in {pod["metadata"]["uid"] for pod in stage.live()},
    )
    stage.settle()
    assert lost["name"] not in {pod["metadata"]["name"] for pod in stage.pods()}
    assert len(stage.made()) == 5
    stage.check()


def test_a_deleted_swarm_leaves_no_pod(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    stage.remove()
    stage.gone()
    stage.operator.check_log()


def test_replicas_up_and_down_and_up_again_never_reuse_a_name(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    names = {pod["metadata"]["name"] for pod in stage.pods()}
    for replicas in (3, 2, 3):
        stage.edit(replicas=replicas)
        stage.settle(servers=2 * replicas)
        names |= {pod["metadata"]["name"] for pod in stage.pods()}
        stage.check()
    assert len(names) == len(stage.made()) == 8  # 2, then 4 more, 2 go, 2 new ones


def test_no_replicas_suspend_a_swarm_and_it_comes_back(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    stage.edit(replicas=0)
    stage.wait("no pods", lambda: not stage.pods())
    stage.edit(replicas=1)
    stage.settle(servers=2)
    stage.check()


def test_the_last_of_many_edits_counts(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    for turn in range(50):
        stage.edit(replicas=1 + turn % 3)
    stage.edit(replicas=2)
    stage.settle()
    stage.check_quiet(3.0)
    stage.check()


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/namespaces/{}/services/counting-servers",
        "/apis/policy/v1/namespaces/{}/poddisruptionbudgets/counting-s1",
    ],
)
def test_a_child_that_is_deleted_by_hand_comes_back(stage: Scene, path: str) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    where = path.format(stage.namespace)
    old = stage.plain.get(where)["metadata"]["uid"]
    stage.plain.delete(where)
    new = stage.wait("the child", lambda: stage.plain.find(where))
    assert new["metadata"]["uid"] != old


def test_a_child_that_is_edited_by_hand_is_put_right(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    path = f"/apis/policy/v1/namespaces/{stage.namespace}/poddisruptionbudgets/counting-s0"
    stage.plain.patch(path, {"spec": {"minAvailable": 0}})
    stage.wait("it", lambda: stage.plain.get(path)["spec"]["minAvailable"] == 2)


def test_a_pod_that_loses_its_owner_is_let_go_and_replaced(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    released = stage.live()[0]["metadata"]["name"]
    path = f"{PODS.format(stage.namespace)}/{released}"
    stage.plain.patch(path, {"metadata": {"ownerReferences": None}})
    stage.wait("one more pod", lambda: len(stage.live()) == 3)
    stage.wait("it to be ready", lambda: stage.status()["coverage"] == 1)
    assert stage.plain.find(path) is not None
    stage.check_quiet(3.0)


def test_a_foreign_pod_with_our_labels_is_left_alone(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    foreign = stage.live()[0]
    meta = {"name": "foreign", "labels": foreign["metadata"]["labels"]}
    spec = {key: foreign["spec"][key] for key in ("containers", "securityContext", "volumes")}
    stage.plain.post(
        PODS.format(stage.namespace),
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec},
    )
    stage.check_quiet(4.0)
    assert stage.plain.find(f"{PODS.format(stage.namespace)}/foreign") is not None


def test_a_finalizer_removed_by_hand_comes_back(stage: Scene) -> None:
    stage.apply(swarm(replicas=1))
    stage.settle(servers=2)
    path = f"{SWARMS.format(stage.namespace)}/counting"
    stage.plain.patch(path, {"metadata": {"finalizers": []}})
    stage.wait("it", lambda: stage.plain.get(path)["metadata"].get("finalizers"))


def test_a_full_quota_is_a_condition_and_heals_when_there_is_room(stage: Scene) -> None:
    quotas = f"/api/v1/namespaces/{stage.namespace}/resourcequotas"
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "pods"},
        "spec": {"hard": {"pods": "3"}},
    }
    stage.plain.post(quotas, quota)
    stage.plain.patch(
        f"{quotas}/pods/status", {"status": {"hard": {"pods": "3"}, "used": {"pods": "0"}}}
    )
    stage.apply(swarm())
    stage.wait("the condition", lambda: "quota" in stage.condition("Degraded").get("message", ""))
    assert stage.condition("Degraded")["status"] == "True"
    tried = len(stage.writes())
    stage.plain.delete(f"{quotas}/pods")
    stage.settle(seconds=60)
    assert len(stage.writes()) - tried < 30
    stage.check()


def test_an_unschedulable_pod_is_kept_and_explained(stage: Scene) -> None:
    stage.kubelet.fate = lambda pod: UNBOUND
    stage.apply(swarm(replicas=1))
    pods = stage.wait("pods", lambda: len(stage.live()) == 2 and stage.live())
    why = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": why,
    }
    for pod in pods:
        path = f"{PODS.format(stage.namespace)}/{pod['metadata']['name']}/status"
        stage.plain.patch(path, {"status": {"conditions": [condition]}})
    stage.wait("the reason", lambda: "(1 more like this)" in str(stage.status()["conditions"]))
    assert "nvidia.com/gpu" in str(stage.status()["conditions"])
    stage.check_quiet(3.0)
    assert {pod["metadata"]["uid"] for pod in pods} == {
        pod["metadata"]["uid"] for pod in stage.live()
    }


def test_delete_and_recreate_in_one_second_ends_with_the_new_swarm_alone(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    old = (stage.stored() or {})["metadata"]["uid"]
    stage.remove()
    stage.wait("the old one to go", lambda: stage.stored() is None)
    stage.apply(swarm())
    stage.settle()
    owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in stage.pods()}
    assert len(owners) == 1
    assert old not in owners


def test_a_graceful_stop_is_quick_and_the_next_operator_changes_nothing(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    code, seconds = stage.operator.stop()
    assert code == 0
    assert seconds < 5
    before = stage.end_state()
    stage.operator.start().wait_ready()
    stage.check_quiet(3.0)
    assert stage.end_state() == before


def test_the_probes_and_the_metrics_tell_what_is(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()
    operator = stage.operator
    assert operator.probe("live")[0] == operator.probe("ready")[0] == 200
    assert operator.metric("modelswarm_operator_pods", state="ready") == 4
    assert operator.metric("modelswarm_operator_swarms", condition="Ready", status="True") == 1
    assert operator.metric("modelswarm_operator_pods_created_total", role="server") == 4
    assert operator.metric("modelswarm_operator_reconcile_seconds_count", result="fault") == 0
    assert operator.metric("modelswarm_operator_leader") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--server-image"),
        (["--server-image", "x", "--namespace", "UPPER"], "--namespace: 'UPPER' is not a name"),
        (["--server-image", "x", "--health", "8080"], "--health: '8080' is not HOST:PORT"),
        (["--server-image", "x"], "--lease-namespace: is needed outside of a cluster"),
        (
            ["--server-image", "x", "--no-leader-election", "--kubeconfig", "/none"],
            "--kubeconfig: /none: no such file",
        ),
        (
            ["--server-image", "x", "--pod-template", "/none"],
            "--pod-template: /none cannot be read",
        ),
        (
            ["--server-image", "x", "--gateway-url", "nowhere"],
            "--gateway-url: 'nowhere' is not a URL",
        ),
        (["--server-image", "x", "--resync", "0"], "--resync"),
    ],
)
def test_bad_flags_are_one_sentence(flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", "modelswarm_operator", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_operator_that_is_stopped_while_it_waits_for_the_api_server_ends_at_once(
    stage: Scene,
) -> None:
    stage.operator.stop()
    stage.proxy.upstream = "https://127.0.0.1:1"
    stage.operator.start()
    stage.wait("its port", lambda: stage.operator.probe("live")[0] == 200)
    assert stage.operator.probe("ready")[0] == 503
    stage.operator.send(signal.SIGTERM)
    assert stage.operator.process.wait(5) == 0
