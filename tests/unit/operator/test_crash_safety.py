"""The operator dies after every single action, or two of them act at once: no pod is doubled, lost or left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
from support.operator.model_cluster import Node, World, document
from support.operator.random_faults import Storm

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import Action, DeletePod

Change = Callable[[World], None]


def nothing(world: World) -> None:
    """The swarm is created."""


def more(world: World) -> None:
    world.edit(replicas=3)


def fewer(world: World) -> None:
    world.edit(replicas=1)


def roll(world: World) -> None:
    world.edit(pools=[{"name": "only", "podTemplate": {"metadata": {"labels": {"team": "x"}}}}])


def respan(world: World) -> None:
    world.edit(spans={"count": 3})


def rename(world: World) -> None:
    world.edit(model={"source": "demo://counting", "servedName": "other"})


def suspend(world: World) -> None:
    world.edit(replicas=0)


def lose_node(world: World) -> None:
    world.node_gone("n0")


def cordon(world: World) -> None:
    world.nodes["n1"].departing = "cordoned"


def lose_pods(world: World) -> None:
    world.kill(world.ready(0)[0])
    world.fail(world.ready(1)[0])


def end(world: World) -> None:
    world.delete_swarm()


CHANGES: list[Change] = [
    nothing, more, fewer, roll, respan, rename, suspend, lose_node, cordon, lose_pods, end,
]  # fmt: skip


class Mortal:
    """Operators that run turns until one has carried out `life` actions in all; then the next one starts."""

    def __init__(self, world: World, life: int) -> None:
        self.world, self.left = world, life
        self.done = 0

    def turn(self) -> bool:
        """Whether there was something to do."""
        seen = self.world.observe()
        actions = list(self.world.decide(seen).actions)
        for action in actions:
            if self.left == 0:
                self.left = -1
                return True
            if not self._act(action, seen):
                break
        return bool(actions)

    def _act(self, action: Action, seen: object) -> bool:
        self.left -= 1
        self.done += 1
        return self.world.carry_out(action, seen)  # type: ignore[arg-type]


def settled(change: Change) -> World:
    nodes = {name: Node(name, room=6) for name in ("n0", "n1", "n2", "n3")}
    world = World(spec=document(2, 2), nodes=nodes)
    if change is not nothing:
        world.settle()
        world.pass_time(60.0)
        world.log.clear()
    change(world)
    return world


def live(world: World, life: int) -> Mortal:
    operator = Mortal(world, life)
    quiet = 0
    for _ in range(200):
        busy = operator.turn() if world.exists else False
        quiet = 0 if busy else quiet + 1
        if quiet > 8:
            return operator
        world.pass_time()
    raise AssertionError(f"no end: {world.log[-10:]} {world.todo()}")


def creates(world: World) -> int:
    return sum(line.startswith("create") for line in world.log)


def deletes(world: World) -> int:
    return sum(line.startswith("delete") for line in world.log)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_operator_crash_after_any_action_keeps_the_end_state(change: Change) -> None:
    clean = settled(change)
    actions = live(clean, -1).done
    for life in range(actions):
        world = settled(change)
        live(world, life)
        assert world.exists == clean.exists
        assert len(world.pods) == len(clean.pods), (life, world.log)
        if world.exists:
            Storm(world).check_end()
        assert creates(world) == creates(clean), (life, world.log)
        assert deletes(world) <= deletes(clean) + 1, (life, world.log)
        assert not world.pods or world.exists


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_two_concurrent_operators_reach_the_same_end_state(change: Change) -> None:
    """Both see the same, and their actions alternate from every offset."""
    clean = settled(change)
    live(clean, -1)
    for offset in range(8):
        world = settled(change)
        quiet = 0
        for _ in count():
            if not world.exists:
                break
            quiet = 0 if _both(world, offset) else quiet + 1
            if quiet > 8:
                break
            world.pass_time()
            assert world.now < 1_001_000.0, (world.log[-10:], world.todo())
        assert world.exists == clean.exists
        assert len(world.pods) == len(clean.pods)
        if world.exists:
            Storm(world).check_end()
        assert creates(world) <= creates(clean) + 1, world.log


def _both(world: World, offset: int) -> bool:
    seen = world.observe()
    first, second = list(world.decide(seen).actions), list(world.decide(seen).actions)
    alive = {0: True, 1: True}
    order = [(0, action) for action in first[:offset]]
    rest = first[offset:]
    for index in range(max(len(rest), len(second))):
        order += [(1, action) for action in second[index : index + 1]]
        order += [(0, action) for action in rest[index : index + 1]]
    for who, action in order:
        if alive[who] and world.exists:
            alive[who] = world.carry_out(action, seen)
    return bool(first)


def test_stale_pod_list_creates_no_second_pod() -> None:
    """The pods are created, but a slow list does not show them yet: the same names are posted again."""
    world = World()
    world.turn()
    for _ in range(3):
        world.turn(replace(world.observe(), pods=()))
    assert len(world.pods) == 4
    assert world.status["incarnation"] == 4


def test_stale_empty_pod_list_creates_a_surplus_that_is_removed() -> None:
    """Served once, then not in the list: gone, as far as one can know. What was made too much is removed."""
    world = World()
    world.settle()
    good = set(world.pods)
    world.turn(replace(world.observe(), pods=()))
    assert (
        len(world.pods) == 8 and len({names.incarnation_of_name(name) for name in world.pods}) == 8
    )
    world.settle()
    assert good == set(world.pods)


def test_operator_with_a_stale_swarm_deletes_nothing() -> None:
    """It would scale down what another has just scaled up; its status write fails first."""
    world = World(spec=document(1, 1))
    world.settle()
    old = world.observe()
    world.edit(replicas=2)
    world.settle()
    late = replace(old, pods=world.observe().pods)
    assert [action for action in world.decide(late).actions if isinstance(action, DeletePod)]
    world.turn(late)
    assert len(world.ready()) == 2 and world.log[-1] == "conflict"
