"""Slots are filled and kept filled, whatever happens to pods."""

from __future__ import annotations

from unit.operator_world import World

from modelswarm_operator.world import CreatePod, WriteStatus


def test_a_new_swarm_gets_a_server_for_every_slot_and_then_there_is_nothing_to_do() -> None:
    world = World()
    world.settle()
    assert len(world.ready()) == 4
    assert world.condition("Ready")["status"] == "True"
    assert world.decide().actions == []


def test_incarnations_are_stored_before_any_pod_is_created() -> None:
    decision = World().decide()
    kinds = [type(action) for action in decision.actions]
    assert kinds[0] is WriteStatus
    assert CreatePod in kinds


def test_a_deleted_pod_is_replaced_at_once_by_a_higher_incarnation() -> None:
    world = World()
    world.settle()
    world.kill(world.ready(0)[0])
    created = [action for action in world.turn().actions if isinstance(action, CreatePod)]
    assert [action.manifest["metadata"]["name"].rsplit("-", 1)[1] for action in created] == ["5"]
    world.settle()
    assert len(world.pods) == 4


def test_a_pod_that_is_gone_without_a_trace_is_replaced() -> None:
    world = World()
    world.settle()
    world.vanish(world.ready(1)[0])
    world.settle()
    assert len(world.ready()) == 4
    assert world.status["incarnation"] == 5
