"""A deleted swarm ends its pods first, creates none, and does not wait for pods that cannot end."""

from __future__ import annotations

from support.operator.model_cluster import ModelCluster

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import (
    CreatePod,
    DeletePod,
    RecordEvent,
    SetFinalizer,
    WriteStatus,
)


def make_settled_cluster() -> ModelCluster:
    cluster = ModelCluster()
    cluster.settle()
    return cluster


def test_finalizer_is_set_before_the_first_pod() -> None:
    actions = ModelCluster().decide().actions
    kinds = [type(action) for action in actions]
    assert kinds.index(SetFinalizer) < kinds.index(CreatePod)


def test_removed_finalizer_is_set_again() -> None:
    cluster = make_settled_cluster()
    cluster.finalizers.clear()
    assert [
        action for action in cluster.run_turn().actions if not isinstance(action, RecordEvent)
    ] == [SetFinalizer(True)]


def test_deleted_swarm_drains_its_pods_and_is_gone() -> None:
    cluster = make_settled_cluster()
    cluster.delete_swarm()
    deletes = [action for action in cluster.run_turn().actions if isinstance(action, DeletePod)]
    assert len(deletes) == 4 and {action.grace_seconds for action in deletes} == {300}
    assert cluster.exists and cluster.condition("Ready")["reason"] == "Deleting"
    cluster.pass_time(5.0)
    cluster.run_turn()
    assert not cluster.pods
    assert not cluster.exists


def test_deletion_during_creation_creates_no_more_pods() -> None:
    cluster = ModelCluster()
    cluster.run_turn(max_actions=5)
    cluster.delete_swarm()
    for _ in range(6):
        if cluster.exists:
            cluster.run_turn()
            cluster.pass_time()
    assert not cluster.exists and not cluster.pods


def test_orphaning_deletion_keeps_the_pods() -> None:
    cluster = make_settled_cluster()
    cluster.finalizers.append("orphan")
    cluster.delete_swarm()
    actions = cluster.run_turn().actions
    assert not [action for action in actions if isinstance(action, DeletePod)]
    assert SetFinalizer(False) in actions
    assert len(cluster.ready_pods()) == 4


def test_protected_swarm_is_not_deleted_and_creates_nothing() -> None:
    cluster = make_settled_cluster()
    cluster.annotate(protect="true")
    cluster.delete_swarm()
    cluster.run_turn()
    cluster.force_delete_pod(cluster.ready_pods()[0])
    for _ in range(5):
        cluster.run_turn()
        cluster.pass_time()
    assert len(cluster.ready_pods()) == 3 and cluster.exists
    assert cluster.condition("Degraded")["reason"] == "Protected"
    assert cluster.condition("Progressing")["status"] == "False"
    assert (
        "kubectl annotate msw counting modelswarm.io/protect-"
        in cluster.condition("Degraded")["message"]
    )
    assert cluster.condition("Ready")["status"] == "True"
    cluster.annotate(protect="false")
    for _ in range(5):
        if cluster.exists:
            cluster.run_turn()
            cluster.pass_time()
    assert not cluster.exists


def test_paused_swarm_can_be_deleted() -> None:
    cluster = make_settled_cluster()
    cluster.edit_spec(paused=True)
    cluster.delete_swarm()
    cluster.run_turn()
    assert all(pod.view.deleting_since is not None for pod in cluster.pods.values())
    kinds = ("Ready", "Progressing", "Degraded")
    assert [cluster.condition(kind)["status"] for kind in kinds] == ["False", "True", "False"]


def test_pods_on_a_dead_node_do_not_block_deletion() -> None:
    cluster = make_settled_cluster()
    cluster.pass_time(100.0)
    cluster.set_node_not_ready("n0")
    cluster.delete_swarm()
    for _ in range(15):
        if cluster.exists:
            cluster.run_turn()
            cluster.pass_time()
    assert not cluster.exists
    assert all(pod.view.node == "n0" for pod in cluster.pods.values())


def test_kept_pods_are_deleted_with_their_swarm() -> None:
    cluster = make_settled_cluster()
    name = cluster.ready_pods()[0]
    cluster.set_pod(name, annotations={**cluster.pods[name].view.annotations, names.KEEP: "true"})
    cluster.settle()
    cluster.delete_swarm()
    for _ in range(6):
        if cluster.exists:
            cluster.run_turn()
            cluster.pass_time()
    assert not cluster.exists and not cluster.pods


def test_deleted_swarm_repeats_no_action() -> None:
    cluster = make_settled_cluster()
    cluster.delete_swarm()
    cluster.run_turn()
    again = [action for action in cluster.run_turn().actions if not isinstance(action, WriteStatus)]
    assert again == []
