"""A swarm that is deleted ends its pods first, creates nothing, and is not held up by what can't end."""

from __future__ import annotations

from support.operator.model_cluster import World

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import (
    CreatePod,
    DeletePod,
    RecordEvent,
    SetFinalizer,
    WriteStatus,
)


def settled() -> World:
    world = World()
    world.settle()
    return world


def test_finalizer_is_set_before_the_first_pod() -> None:
    actions = World().decide().actions
    kinds = [type(action) for action in actions]
    assert kinds.index(SetFinalizer) < kinds.index(CreatePod)


def test_removed_finalizer_is_set_again() -> None:
    world = settled()
    world.finalizers.clear()
    assert [action for action in world.turn().actions if not isinstance(action, RecordEvent)] == [
        SetFinalizer(True)
    ]


def test_deleted_swarm_drains_its_pods_and_is_gone() -> None:
    world = settled()
    world.delete_swarm()
    deletes = [action for action in world.turn().actions if isinstance(action, DeletePod)]
    assert len(deletes) == 4 and {action.grace_seconds for action in deletes} == {300}
    assert world.exists and world.condition("Ready")["reason"] == "Deleting"
    world.pass_time(5.0)
    world.turn()
    assert not world.pods
    assert not world.exists


def test_deletion_during_creation_creates_no_more_pods() -> None:
    world = World()
    world.turn(most=5)
    world.delete_swarm()
    for _ in range(6):
        if world.exists:
            world.turn()
            world.pass_time()
    assert not world.exists and not world.pods


def test_orphaning_deletion_keeps_the_pods() -> None:
    world = settled()
    world.finalizers.append("orphan")
    world.delete_swarm()
    actions = world.turn().actions
    assert not [action for action in actions if isinstance(action, DeletePod)]
    assert SetFinalizer(False) in actions
    assert len(world.ready()) == 4


def test_protected_swarm_is_not_deleted_and_creates_nothing() -> None:
    world = settled()
    world.annotate(protect="true")
    world.delete_swarm()
    world.turn()
    world.vanish(world.ready()[0])
    for _ in range(5):
        world.turn()
        world.pass_time()
    assert len(world.ready()) == 3 and world.exists
    assert world.condition("Degraded")["reason"] == "Protected"
    assert (
        "kubectl annotate msw counting modelswarm.io/protect-"
        in world.condition("Degraded")["message"]
    )
    assert world.condition("Ready")["status"] == "True"
    world.annotate(protect="false")
    for _ in range(5):
        if world.exists:
            world.turn()
            world.pass_time()
    assert not world.exists


def test_paused_swarm_can_be_deleted() -> None:
    world = settled()
    world.edit(paused=True)
    world.delete_swarm()
    world.turn()
    assert all(pod.view.deleting_since is not None for pod in world.pods.values())


def test_pods_on_a_dead_node_do_not_block_deletion() -> None:
    world = settled()
    world.pass_time(100.0)
    world.node_down("n0")
    world.delete_swarm()
    for _ in range(15):
        if world.exists:
            world.turn()
            world.pass_time()
    assert not world.exists
    assert all(pod.view.node == "n0" for pod in world.pods.values())


def test_kept_pods_are_deleted_with_their_swarm() -> None:
    world = settled()
    name = world.ready()[0]
    world.set_pod(name, annotations={**world.pods[name].view.annotations, names.KEEP: "true"})
    world.settle()
    world.delete_swarm()
    for _ in range(6):
        if world.exists:
            world.turn()
            world.pass_time()
    assert not world.exists and not world.pods


def test_deleted_swarm_repeats_no_action() -> None:
    world = settled()
    world.delete_swarm()
    world.turn()
    again = [action for action in world.turn().actions if not isinstance(action, WriteStatus)]
    assert again == []
