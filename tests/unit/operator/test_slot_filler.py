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


def test_a_new_swarm_gets_a_server_for_every_slot_and_then_there_is_nothing_to_do() -> None:
    world = World()
    world.settle()
    assert len(world.ready()) == 4
    assert world.condition("Ready")["status"] == "True"
    assert world.decide().actions == []


def test_incarnations_are_stored_before_any_pod_is_created() -> None:
    kinds = [type(action) for action in World().decide().actions]
    assert kinds[0] is WriteStatus
    assert CreatePod in kinds


def test_a_deleted_pod_is_replaced_at_once_by_a_higher_incarnation() -> None:
    world = World()
    world.settle()
    world.kill(world.ready(0)[0])
    assert created(world) == ["0-0"]
    assert max(map(names.incarnation_of_name, world.pods)) == 5
    world.settle()
    assert len(world.pods) == 4


def test_a_pod_that_is_gone_without_a_trace_is_replaced() -> None:
    world = World()
    world.settle()
    world.vanish(world.ready(1)[0])
    world.settle()
    assert len(world.ready()) == 4
    assert world.status["incarnation"] == 5


def test_an_evicted_pod_is_removed_and_its_slot_filled_in_the_same_turn() -> None:
    world = World()
    world.settle()
    victim = world.ready(0)[1]
    world.fail(victim, "Evicted", "The node was low on resource: memory")
    actions = world.turn().actions
    assert [a.name for a in actions if isinstance(a, DeletePod)] == [victim]
    assert [a.slot for a in actions if isinstance(a, CreatePod)] == ["0-1"]
    told = next(tell for tell in world.told if tell.reason == "ServerFailed")
    assert "Evicted" in told.message and "low on resource" in told.message


def test_each_further_failure_of_a_slot_waits_twice_as_long() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    waits = []
    for _ in range(5):
        world.fail(next(iter(world.pods)))
        waits.append(seconds_until_created(world))
    assert waits == [0.0, 2.0, 4.0, 8.0, 16.0]


def test_failures_are_forgotten_when_a_server_has_been_stable() -> None:
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


def test_a_crashing_container_is_left_to_the_kubelet_until_it_has_crashed_often() -> None:
    world = World(spec=document(1, 1))
    world.poison = lambda pod: True
    world.turn()
    first = next(iter(world.pods))
    while (view := world.pods[first].view).deleting_since is None:
        assert view.container.restarts < POLICY.max_restarts
        world.pass_time()
        world.turn()
    assert world.status["slots"][0]["failures"] == 1


def test_a_broken_image_makes_no_pod_storm() -> None:
    world = World(spec=document(2, 3))
    world.poison = lambda pod: True
    for _ in range(400):
        world.pass_time(10.0)
        world.turn()
    assert len(world.used) < 6 * 20  # an hour, six slots
    degraded = world.condition("Degraded")
    assert degraded["status"] == "True"
    assert "RestartBudgetUsedUp" in degraded["message"] or "failed" in degraded["message"]


def test_when_the_budget_is_used_up_every_failure_waits_the_longest_pause() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    for _ in range(POLICY.min_budget):
        world.fail(next(iter(world.pods)))
        seconds_until_created(world)
    world.fail(next(iter(world.pods)))
    assert seconds_until_created(world) == POLICY.backoff_limit
    assert "waits 300 s" in world.condition("Degraded")["message"]


def test_a_person_can_end_all_waiting_by_annotation() -> None:
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


def test_one_bad_slot_leaves_the_others_alone() -> None:
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


def test_a_pod_without_a_node_is_kept_waiting_not_made_again() -> None:
    world = World()
    for node in world.nodes.values():
        node.room = 0
    for _ in range(120):
        world.turn()
        world.pass_time()
    assert world.status["incarnation"] == 4
    assert world.condition("Degraded")["reason"] == "NoCapacity"
    assert world.decide().actions == []


def test_a_refused_create_is_repeated_with_growing_pauses_under_the_same_name() -> None:
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


def test_a_promised_name_that_a_foreign_pod_has_is_given_up_for_the_next_one() -> None:
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


def test_refusals_do_not_use_up_the_budget_of_failures() -> None:
    world = World(spec=document(2, 3), quota=1)
    for _ in range(60):
        world.turn()
        world.pass_time(10.0)
    assert "RestartBudgetUsedUp" not in world.condition("Degraded")["message"]


def test_a_preempted_pod_counts_as_a_failure_so_that_two_do_not_fight_for_a_place() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    name = world.ready()[0]
    world.set_pod(name, disruption="PreemptionByScheduler")
    world.kill(name)
    world.turn()
    assert world.status["slots"][0]["failures"] == 1
    assert "preempted" in world.status["slots"][0]["lastFailure"]


def test_what_the_containers_of_a_deleted_pod_end_with_is_no_failure() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    name = world.ready()[0]
    world.kill(name)
    world.fail(name, reason="", message="")
    world.turn()
    assert "failures" not in world.status["slots"][0]


def test_an_eviction_is_no_failure() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    name = world.ready()[0]
    world.set_pod(name, disruption="EvictionByEvictionAPI")
    world.kill(name)
    world.turn()
    assert "failures" not in world.status["slots"][0]


def test_readiness_that_flaps_replaces_nothing() -> None:
    world = World()
    world.settle()
    name = world.ready()[0]
    for number in range(60):
        world.set_pod(name, ready=number % 2 == 0)
        world.turn()
        world.now += 1.0
    assert world.status["incarnation"] == 4
    assert name in world.pods


def test_a_pod_kept_for_debugging_goes_out_of_service_and_its_slot_is_filled() -> None:
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
def test_an_edited_label_is_put_right_and_the_pod_stays(label: str) -> None:
    world = World()
    world.settle()
    name = world.ready(0)[0]
    right = dict(world.pods[name].view.labels)
    world.set_pod(name, labels={**right, label: "17"})
    world.settle()
    assert world.pods[name].view.labels == right
    assert world.status["incarnation"] == 4


def test_a_pod_of_ours_that_fills_no_slot_is_removed() -> None:
    world = World()
    world.settle()
    name = world.ready(0)[0]
    annotations = {k: v for k, v in world.pods[name].view.annotations.items() if k != names.SLOT}
    world.set_pod(
        name, labels={**world.pods[name].view.labels, names.SLOT: "?"}, annotations=annotations
    )
    world.settle()
    assert name not in world.pods and len(world.ready()) == 4


def test_of_two_ready_pods_of_a_slot_the_higher_incarnation_stays() -> None:
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


def test_a_swarm_restored_without_status_keeps_its_pods_and_reuses_no_number() -> None:
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


def test_a_clock_that_was_set_back_by_an_hour_waits_no_longer_than_the_longest_pause() -> None:
    world = World(spec=document(1, 1))
    world.settle()
    for _ in range(4):
        world.fail(next(iter(world.pods)))
        seconds_until_created(world)
    world.fail(next(iter(world.pods)))
    world.turn()
    world.now -= 3600.0
    assert seconds_until_created(world) <= POLICY.backoff_limit


def test_a_server_that_is_out_of_memory_says_its_limit() -> None:
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
