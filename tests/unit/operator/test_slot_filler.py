"""Slots are filled and kept filled, whatever happens to pods; what keeps failing is not retried in a storm."""

from __future__ import annotations

import pytest
from support.operator.model_cluster import POLICY, World, document

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import CreatePod, DeletePod, LabelPod, WriteStatus
from modelswarm_operator.reconcile.state.observed import NAME_TAKEN, ContainerView


def created(world: World) -> list[str]:
    """Slots that a turn now creates pods for."""
    return [action.slot for action in world.turn().actions if isinstance(action, CreatePod)]


def seconds_until_created(world: World) -> float:
    """Looks when the operator asks to; how long that took until it created something."""
    started = world.now
    while not created(world):
        assert world.wake_at is not None and world.wake_at > world.now
        world.now = world.wake_at
    return world.now - started


def test_new_swarm_fills_every_slot_and_then_idles() -> None:
    world = World()
    world.settle()
    assert len(world.ready()) == 4
    assert world.condition("Ready")["status"] == "True"
    assert world.decide().actions == []


def test_incarnations_are_stored_before_pods_are_created() -> None:
    kinds = [type(action) for action in World().decide().actions]
    assert kinds[0] is WriteStatus
    assert CreatePod in kinds


def test_deleted_pod_is_replaced_with_a_higher_incarnation() -> None:
    world = World()
    world.settle()
    world.kill(world.ready(0)[0])
    assert created(world) == ["0-0"]
    assert max(map(names.incarnation_of_name, world.pods)) == 5
    world.settle()
    assert len(world.pods) == 4


def test_force_deleted_pod_is_replaced() -> None:
    world = World()
    world.settle()
    world.vanish(world.ready(1)[0])
    world.settle()
    assert len(world.ready()) == 4
    assert world.status["incarnation"] == 5


def test_evicted_pod_is_deleted_and_replaced_in_the_same_turn() -> None:
    world = World()
    world.settle()
    victim = world.ready(0)[1]
    world.fail(victim, "Evicted", "The node was low on resource: memory")
    actions = world.turn().actions
    assert [a.name for a in actions if isinstance(a, DeletePod)] == [victim]
    assert [a.slot for a in actions if isinstance(a, CreatePod)] == ["0-1"]
    told = next(tell for tell in world.told if tell.reason == "ServerFailed")
    assert "Evicted" in told.message and "low on resource" in told.message


def test_slot_backoff_doubles_with_each_failure() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    waits = []
    for _ in range(5):
        world.fail(next(iter(world.pods)))
        waits.append(seconds_until_created(world))
    assert waits == [0.0, 2.0, 4.0, 8.0, 16.0]


def test_slot_failures_reset_after_a_stable_run() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    world.fail(next(iter(world.pods)))
    world.settle()
    assert world.status["slots"][0]["failures"] == 1
    assert world.wake_at is not None
    world.now = world.wake_at
    world.turn()
    assert "slots" not in world.status
    assert world.decide().requeue_at is None


def test_crashing_container_is_deleted_after_max_restarts() -> None:
    world = World(spec=document(1, 1))
    world.poison = lambda pod: True
    world.turn()
    first = next(iter(world.pods))
    while (view := world.pods[first].view).deleting_since is None:
        assert view.container.restarts < POLICY.max_restarts
        world.pass_time()
        world.turn()
    assert world.status["slots"][0]["failures"] == 1


def test_broken_image_creates_few_pods() -> None:
    world = World(spec=document(2, 3))
    world.poison = lambda pod: True
    for _ in range(400):
        world.pass_time(10.0)
        world.turn()
    assert len(world.used) < 6 * 20  # an hour, six slots
    degraded = world.condition("Degraded")
    assert degraded["status"] == "True"
    assert "RestartBudgetUsedUp" in degraded["message"] or "failed" in degraded["message"]


def test_exhausted_budget_makes_failures_wait_the_longest() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    for _ in range(POLICY.min_budget):
        world.fail(next(iter(world.pods)))
        seconds_until_created(world)
    world.fail(next(iter(world.pods)))
    assert seconds_until_created(world) == POLICY.backoff_limit
    assert "waits 300 s" in world.condition("Degraded")["message"]


def test_reconcile_annotation_ends_the_backoff() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    for _ in range(4):
        world.fail(next(iter(world.pods)))
        seconds_until_created(world)
    world.fail(next(iter(world.pods)))
    assert created(world) == []
    world.annotate(**{"reconcile-at": "now"})
    assert created(world) == ["0-0"]
    assert world.status["reconciledAt"] == "now"
    world.settle()


def test_failing_slot_leaves_other_slots_alone() -> None:
    world = World()
    world.settle()
    good = set(world.ready()[1:])
    world.poison = lambda pod: pod.name not in good
    world.kill(world.ready()[0])
    for _ in range(100):
        world.pass_time(3.0)
        world.turn()
    assert good <= set(world.ready())
    assert not any(f"delete {name}" in line for name in good for line in world.log)


def test_unschedulable_pod_is_kept() -> None:
    world = World()
    for node in world.nodes.values():
        node.room = 0
    for _ in range(120):
        world.turn()
        world.pass_time()
    assert world.status["incarnation"] == 4
    assert world.condition("Degraded")["reason"] == "NoCapacity"
    assert world.decide().actions == []


def test_refused_create_is_retried_with_backoff_under_its_name() -> None:
    world = World(spec=document(1, 2), quota=1)
    attempts = 0
    for _ in range(300):
        attempts += "0-1" in created(world)
        world.pass_time()
    assert attempts <= 11
    assert world.status["incarnation"] == 2
    assert world.condition("Degraded")["reason"] == "CreateRefused"
    assert "exceeded quota: pods=1" in world.condition("Degraded")["message"]
    assert world.condition("Ready")["status"] == "True"
    world.quota = None
    seconds_until_created(world)
    world.settle()
    assert len(world.ready()) == 2
    assert world.condition("Degraded")["status"] == "False"


def test_incarnation_whose_name_is_taken_is_skipped() -> None:
    world = World(spec=document(1, 1))
    world.turn()
    world.pods.clear()  # it was never made: a pod of somebody else's has the name
    world.rejected["0-0"] = f"a pod counting-s0-1 {NAME_TAKEN}"
    (again,) = [one for one in world.decide().actions if isinstance(one, CreatePod)]
    assert again.manifest["metadata"]["labels"]["modelswarm.io/incarnation"] == "2"
    world.rejected.clear()
    world.settle()
    assert len(world.ready()) == 1
    assert not world.status.get("slots")


def test_refused_creates_do_not_use_the_failure_budget() -> None:
    world = World(spec=document(2, 3), quota=1)
    for _ in range(60):
        world.turn()
        world.pass_time(10.0)
    assert "RestartBudgetUsedUp" not in world.condition("Degraded")["message"]


def test_preempted_pod_counts_as_a_failure() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    name = world.ready()[0]
    world.set_pod(name, disruption="PreemptionByScheduler")
    world.kill(name)
    world.turn()
    assert world.status["slots"][0]["failures"] == 1
    assert "preempted" in world.status["slots"][0]["lastFailure"]


def test_failed_container_of_a_deleted_pod_is_not_counted() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    name = world.ready()[0]
    world.kill(name)
    world.fail(name, reason="", message="")
    world.turn()
    assert "failures" not in world.status["slots"][0]


def test_eviction_is_not_counted_as_a_failure() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    name = world.ready()[0]
    world.set_pod(name, disruption="EvictionByEvictionAPI")
    world.kill(name)
    world.turn()
    assert "failures" not in world.status["slots"][0]


def test_flapping_readiness_replaces_no_pod() -> None:
    world = World()
    world.settle()
    name = world.ready()[0]
    for number in range(60):
        world.set_pod(name, ready=number % 2 == 0)
        world.turn()
        world.now += 1.0
    assert world.status["incarnation"] == 4
    assert name in world.pods


def test_kept_pod_leaves_service_and_its_slot_is_filled() -> None:
    world = World()
    world.settle()
    name = world.ready(0)[0]
    annotations = {**world.pods[name].view.annotations, names.KEEP: "true"}
    world.set_pod(name, annotations=annotations)
    actions = world.turn().actions
    assert [a for a in actions if isinstance(a, LabelPod)] == [
        LabelPod(name, world.pods[name].view.uid, {names.ROLE: names.KEPT})
    ]
    world.settle()
    assert name in world.pods and len(world.ready(0)) == 2
    assert world.decide().actions == []
    del annotations[names.KEEP]
    world.set_pod(name, annotations=annotations)
    world.settle()
    assert name not in world.pods


@pytest.mark.parametrize("label", [names.SLOT, names.SPAN, names.INCARNATION])
def test_edited_label_is_restored(label: str) -> None:
    world = World()
    world.settle()
    name = world.ready(0)[0]
    right = dict(world.pods[name].view.labels)
    world.set_pod(name, labels={**right, label: "17"})
    world.settle()
    assert world.pods[name].view.labels == right
    assert world.status["incarnation"] == 4


def test_pod_without_a_valid_slot_is_deleted() -> None:
    world = World()
    world.settle()
    name = world.ready(0)[0]
    annotations = {k: v for k, v in world.pods[name].view.annotations.items() if k != names.SLOT}
    world.set_pod(
        name, labels={**world.pods[name].view.labels, names.SLOT: "?"}, annotations=annotations
    )
    world.settle()
    assert name not in world.pods and len(world.ready()) == 4


def test_slot_with_two_ready_pods_keeps_the_newer() -> None:
    world = World()
    world.settle()
    old = world.ready(0)[0]
    world.node_down(world.pods[old].view.node)
    world.pass_time(1.0)
    for _ in range(15):
        world.turn()
        world.pass_time()
    for name in list(world.nodes):
        world.node_up(name)
    world.settle()
    assert old not in world.pods
    assert len(world.ready()) == 4


def test_lost_status_keeps_pods_and_reuses_no_incarnation() -> None:
    world = World()
    world.settle()
    world.status = {}
    world.version += 1
    before = set(world.pods)
    world.settle()
    assert set(world.pods) == before
    assert world.status["incarnation"] == 4
    world.kill(world.ready()[0])
    world.settle()
    assert world.status["incarnation"] == 5


def test_clock_set_back_extends_no_backoff_beyond_the_limit() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    for _ in range(4):
        world.fail(next(iter(world.pods)))
        seconds_until_created(world)
    world.fail(next(iter(world.pods)))
    world.turn()
    world.now -= 3600.0
    assert seconds_until_created(world) <= POLICY.backoff_limit


def test_out_of_memory_condition_names_the_limit() -> None:
    pools = [{"name": "small", "resources": {"limits": {"memory": "2Gi"}}}]
    world = World(spec=document(1, 1, pools=pools))
    world.settle()
    killed = ContainerView(
        restarts=1, exit_code=137, exit_reason="OOMKilled", waiting="CrashLoopBackOff"
    )
    world.set_pod(world.ready()[0], ready=False, container=killed)
    world.turn()
    degraded = world.condition("Degraded")
    assert degraded["reason"] == "OutOfMemory"
    assert "2Gi" in degraded["message"] and "resources.limits.memory" in degraded["message"]
