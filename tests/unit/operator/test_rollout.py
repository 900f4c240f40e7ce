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


def test_rollout_replaces_one_slot_per_span_and_surges_first() -> None:
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


def test_single_replica_rolls_without_a_gap_despite_surge_0() -> None:
    world = roomy(2, 1, rollout={"surge": 0})
    world.edit(pools=team("a"))
    watch(world, lambda: _at_least(world, 1), 30)
    assert len(world.pods) == 2
    assert all(pod.manifest["metadata"]["labels"]["team"] == "a" for pod in world.servers())


def test_rollout_with_surge_0_deletes_before_it_creates() -> None:
    world = roomy(1, 3, rollout={"surge": 0})
    world.edit(pools=team("a"))

    def seen() -> None:
        assert world.coverage() >= 2
        assert sum(pod.view.deleting_since is None for pod in world.servers()) <= 3

    watch(world, seen, 40)
    assert all(pod.manifest["metadata"]["labels"]["team"] == "a" for pod in world.servers())
    assert len(world.ready()) == 3


def test_rollout_without_capacity_continues_at_surge_0() -> None:
    world = World(spec=document(1, 2), nodes={"n0": Node("n0", room=2)})
    world.settle()
    world.edit(pools=team("a"))
    watch(world, lambda: _at_least(world, 2), 15)
    assert world.condition("Degraded")["reason"] == "NoCapacity"
    world.edit(rollout={"surge": 0})
    watch(world, lambda: _at_least(world, 1), 40)
    assert all(pod.manifest["metadata"]["labels"]["team"] == "a" for pod in world.servers())


def test_failing_template_stops_the_rollout_and_keeps_old_pods() -> None:
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


def test_corrected_template_of_unready_pods_rolls_out_at_once() -> None:
    world = World(spec=document(1, 2, pools=team("bad")))
    world.poison = lambda pod: pod.manifest["metadata"]["labels"].get("team") == "bad"
    watch(world, lambda: None, 20)
    world.edit(pools=team("good"))
    watch(world, lambda: None, 8)
    assert len(world.ready()) == 2


def test_scale_up_adds_and_scale_down_removes_highest_ordinals() -> None:
    world = roomy(2, 2)
    world.edit(replicas=3)
    world.settle()
    assert len(world.ready(0)) == len(world.ready(1)) == 3
    world.edit(replicas=1)
    world.settle()
    assert sorted(pod.view.labels[names.SLOT] for pod in world.servers()) == ["0-0", "1-0"]


def test_scale_down_removes_unready_pods_first() -> None:
    world = roomy(1, 3)
    broken = world.ready()[0]
    world.set_pod(broken, ready=False)
    world.poison = lambda pod: pod.name == broken
    world.edit(replicas=2)
    world.settle()
    assert broken not in world.pods
    assert len(world.ready()) == 2
    assert world.status["incarnation"] == 3


def test_replica_changes_never_reuse_an_incarnation() -> None:
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


def test_zero_replicas_suspend_the_swarm_until_scaled_up() -> None:
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


def test_new_spans_serve_before_old_ones_are_deleted() -> None:
    world = roomy(2, 2)
    old = set(world.pods)
    world.edit(spans={"count": 3})
    world.turn()
    assert len(world.pods) == 4 + 3  # one of each new span, the surge
    watch(world, lambda: _at_least(world, 2), 60)
    assert not old & set(world.pods)
    assert world.status["spansText"] == "0:3=2/2 3:6=2/2 6:8=2/2"
    world.settle()


def test_plan_is_stored_before_use_and_kept() -> None:
    world = roomy()
    world.edit(spans={})
    world.turn(most=1)
    stored = world.status["plan"]
    assert [span["last"] for span in stored["spans"]] == [8]
    world.settle()
    assert world.status["plan"] == stored


def test_new_served_name_is_ready_before_old_pods_are_deleted() -> None:
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


def test_paused_swarm_changes_nothing() -> None:
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


def test_new_server_image_replaces_no_pod() -> None:
    world = roomy()
    world.policy = replace(
        POLICY, server_image="registry.example/server:2", image_pull_policy="Always"
    )
    assert world.decide().actions == []
    world.kill(world.ready()[0])
    world.settle()
    images = {pod.manifest["spec"]["containers"][0]["image"] for pod in world.pods.values()}
    assert images == {"registry.example/server:1", "registry.example/server:2"}


def test_new_pool_moves_no_pod_and_removed_pool_rolls_its_pods() -> None:
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


def test_replicas_of_a_span_alternate_between_pools() -> None:
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
def test_edit_that_no_pod_depends_on_rolls_nothing(change: dict[str, Any]) -> None:
    world = roomy()
    world.edit(**change)
    actions = world.turn().actions
    assert not [action for action in actions if isinstance(action, CreatePod | DeletePod)]


def test_deletion_uses_the_current_drain_limit() -> None:
    world = roomy(1, 2)
    world.edit(replicas=1, rollout={"drainLimit": "90s"})
    deletes = [action for action in world.turn().actions if isinstance(action, DeletePod)]
    assert [action.grace_seconds for action in deletes] == [90]


def test_fifty_rapid_edits_end_in_the_last() -> None:
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
