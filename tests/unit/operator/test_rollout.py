"""Changes that people ask for: rolls, scaling, new spans, another model. Nothing is uncovered on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.operator.model_cluster import POLICY, Node, World, document

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import CreatePod, DeletePod


def team(value: str) -> list[dict[str, Any]]:
    return [{"name": "only", "podTemplate": {"metadata": {"labels": {"team": value}}}}]


def roomy(spans: int = 2, replicas: int = 2, **more: Any) -> World:
    nodes = {name: Node(name, room=20) for name in ("n0", "n1", "n2")}
    world = World(spec=document(spans, replicas, **more), nodes=nodes)
    world.settle()
    return world


def watch(world: World, seen: Callable[[], None], seconds: int = 60) -> None:
    for _ in range(seconds):
        world.turn()
        seen()
        world.pass_time()


def test_a_roll_renews_one_slot_of_each_span_at_a_time_and_adds_before_it_takes() -> None:
    world = roomy(2, 3)
    old = set(world.pods)
    world.edit(pools=team("a"))
    most: list[int] = []

    def seen() -> None:
        assert world.coverage() >= 3
        for span in (0, 1):
            there = [p for p in world.servers() if p.view.labels[names.SPAN] == str(span)]
            most.append(sum(p.view.deleting_since is None for p in there))

    watch(world, seen)
    assert max(most) == 4
    assert not old & set(world.pods) and len(world.ready()) == 6
    assert all(pod.manifest["metadata"]["labels"]["team"] == "a" for pod in world.servers())
    world.settle()


def test_a_single_server_is_rolled_without_a_gap_even_with_surge_0() -> None:
    world = roomy(2, 1, rollout={"surge": 0})
    world.edit(pools=team("a"))
    watch(world, lambda: _at_least(world, 1), 30)
    assert len(world.pods) == 2
    assert all(pod.manifest["metadata"]["labels"]["team"] == "a" for pod in world.servers())


def test_without_surge_the_old_server_goes_first_and_no_more_servers_than_wanted_run() -> None:
    world = roomy(1, 3, rollout={"surge": 0})
    world.edit(pools=team("a"))

    def seen() -> None:
        assert world.coverage() >= 2
        assert sum(pod.view.deleting_since is None for pod in world.servers()) <= 3

    watch(world, seen, 40)
    assert all(pod.manifest["metadata"]["labels"]["team"] == "a" for pod in world.servers())
    assert len(world.ready()) == 3


def test_a_roll_that_finds_no_room_goes_on_when_surge_is_set_to_0() -> None:
    world = World(spec=document(1, 2), nodes={"n0": Node("n0", room=2)})
    world.settle()
    world.edit(pools=team("a"))
    watch(world, lambda: _at_least(world, 2), 15)
    assert world.condition("Degraded")["reason"] == "NoCapacity"
    world.edit(rollout={"surge": 0})
    watch(world, lambda: _at_least(world, 1), 40)
    assert all(pod.manifest["metadata"]["labels"]["team"] == "a" for pod in world.servers())


def test_a_recipe_that_fails_stops_the_roll_and_leaves_the_good_servers() -> None:
    world = roomy(2, 3)
    good = set(world.ready())
    world.poison = lambda pod: pod.name not in good
    world.edit(pools=team("bad"))
    watch(world, lambda: _at_least(world, 3), 200)
    assert good <= set(world.ready())
    assert len(world.pods) <= 8
    world.edit(pools=[])
    world.settle()
    assert set(world.pods) == good


def test_a_correction_of_what_never_served_is_tried_at_once() -> None:
    world = World(spec=document(1, 2, pools=team("bad")))
    world.poison = lambda pod: pod.manifest["metadata"]["labels"].get("team") == "bad"
    watch(world, lambda: None, 20)
    world.edit(pools=team("good"))
    watch(world, lambda: None, 8)
    assert len(world.ready()) == 2


def test_scaling_up_adds_and_scaling_down_takes_the_highest_ordinals() -> None:
    world = roomy(2, 2)
    world.edit(replicas=3)
    world.settle()
    assert len(world.ready(0)) == len(world.ready(1)) == 3
    world.edit(replicas=1)
    world.settle()
    assert sorted(pod.view.labels[names.SLOT] for pod in world.servers()) == ["0-0", "1-0"]


def test_scaling_down_gives_up_what_does_not_serve_first() -> None:
    world = roomy(1, 3)
    broken = world.ready()[0]
    world.set_pod(broken, ready=False)
    world.poison = lambda pod: pod.name == broken
    world.edit(replicas=2)
    world.settle()
    assert broken not in world.pods
    assert len(world.ready()) == 2
    assert world.status["incarnation"] == 3


def test_three_two_three_replicas_with_one_running_never_reuses_a_number() -> None:
    world = World(spec=document(1, 3), nodes={"n0": Node("n0", room=1)})
    watch(world, lambda: None, 5)
    world.edit(replicas=2)
    world.turn()
    world.edit(replicas=3)
    world.turn()
    assert len(world.used) == len(set(world.used)) == 4
    world.nodes["n0"].room = 9
    world.settle()
    assert len(world.ready()) == 3


def test_no_replicas_suspend_the_swarm_and_replicas_wake_it() -> None:
    world = roomy()
    world.edit(replicas=0)
    world.settle()
    assert not world.pods
    assert world.condition("Ready")["reason"] == "Suspended"
    assert world.condition("Degraded")["status"] == "False"
    assert [kind for kind, _ in world.children] == ["Service"]
    world.edit(replicas=2)
    world.settle()
    assert len(world.ready()) == 4


def test_new_spans_serve_before_the_old_ones_go() -> None:
    world = roomy(2, 2)
    old = set(world.pods)
    world.edit(spans={"count": 3})
    world.turn()
    assert len(world.pods) == 4 + 3  # one of each new span, the surge
    watch(world, lambda: _at_least(world, 2), 60)
    assert not old & set(world.pods)
    assert world.status["spansText"] == "0:3=2/2 3:6=2/2 6:8=2/2"
    world.settle()


def test_a_plan_is_stored_before_it_is_acted_on_and_kept_by_another_operator() -> None:
    world = roomy()
    world.edit(spans={})
    world.turn(most=1)
    stored = world.status["plan"]
    assert [span["last"] for span in stored["spans"]] == [8]
    world.settle()
    assert world.status["plan"] == stored


def test_another_model_name_is_served_whole_before_the_first_server_of_the_old_one_goes() -> None:
    world = roomy(2, 1)
    old = set(world.pods)
    world.edit(model={"source": "demo://counting", "servedName": "other"})

    def seen() -> None:
        generations: dict[str, set[str]] = {}
        for pod in world.servers():
            if pod.view.ready and pod.view.deleting_since is None:
                generation = pod.view.annotations[names.MODEL_HASH]
                generations.setdefault(generation, set()).add(pod.view.annotations[names.BLOCKS])
        assert {"0:4", "4:8"} in generations.values()

    watch(world, seen, 30)
    assert not old & set(world.pods) and len(world.ready()) == 2


def test_a_paused_swarm_changes_nothing() -> None:
    world = roomy()
    world.edit(paused=True, replicas=3)
    world.kill(world.ready()[0])
    watch(world, lambda: None, 10)
    assert len(world.pods) == 3
    assert world.condition("Progressing")["reason"] == "Paused"
    assert world.condition("Ready")["status"] == "True"
    world.edit(paused=False)
    world.settle()
    assert len(world.ready()) == 6


def test_another_image_of_the_operator_moves_no_pod() -> None:
    world = roomy()
    world.policy = replace(
        POLICY, server_image="registry.example/server:2", image_pull_policy="Always"
    )
    assert world.decide().actions == []
    world.kill(world.ready()[0])
    world.settle()
    images = {pod.manifest["spec"]["containers"][0]["image"] for pod in world.pods.values()}
    assert images == {"registry.example/server:1", "registry.example/server:2"}


def test_a_new_pool_moves_no_pod_and_one_that_is_gone_has_its_pods_renewed() -> None:
    one, two = {"name": "one"}, {"name": "two"}
    world = roomy(2, 2, pools=[one])
    before = set(world.pods)
    world.edit(pools=[one, two])
    world.settle()
    assert set(world.pods) == before
    world.edit(replicas=3)
    world.settle()
    assert [pod.view.annotations[names.POOL] for pod in world.servers()].count("two") == 2
    world.edit(pools=[two])
    world.settle()
    assert {pod.view.annotations[names.POOL] for pod in world.servers()} == {"two"}


def test_pools_take_turns() -> None:
    world = roomy(2, 2, pools=[{"name": "one"}, {"name": "two"}])
    for span in "01":
        pools = [
            p.view.annotations[names.POOL]
            for p in world.servers()
            if p.view.labels[names.SPAN] == span
        ]
        assert sorted(pools) == ["one", "two"]


@pytest.mark.parametrize(
    "change",
    [
        {"sessions": {"holdLimit": "9m"}},
        {"rollout": {"surge": 3, "drainLimit": "10s"}},
        {"paused": False},
    ],
)
def test_what_no_server_is_made_from_rolls_nothing(change: dict[str, Any]) -> None:
    world = roomy()
    world.edit(**change)
    actions = world.turn().actions
    assert not [action for action in actions if isinstance(action, CreatePod | DeletePod)]


def test_drained_servers_get_the_drain_limit_of_today() -> None:
    world = roomy(1, 2)
    world.edit(replicas=1, rollout={"drainLimit": "90s"})
    deletes = [action for action in world.turn().actions if isinstance(action, DeletePod)]
    assert [action.grace_seconds for action in deletes] == [90]


def test_fifty_edits_in_a_row_end_in_the_last() -> None:
    world = roomy()
    for number in range(50):
        world.edit(pools=team(str(number)), replicas=1 + number % 3)
        world.turn()
        world.pass_time(0.1)
    world.settle(rounds=200)
    assert {pod.manifest["metadata"]["labels"]["team"] for pod in world.servers()} == {"49"}
    assert len(world.ready()) == 2 * world.spec["replicas"]


def _at_least(world: World, servers: int) -> None:
    assert world.coverage() >= servers
