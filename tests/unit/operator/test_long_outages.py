"""What takes hours on a cluster, in virtual time: outages, soaks, clocks that jump, edits that follow each other."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from support.operator.model_cluster import Node, World, document
from support.operator.random_faults import Storm

from modelswarm_operator.reconcile.state import names

POOL = {"name": "a", "podTemplate": {"metadata": {"labels": {"team": "x"}}}}
STATES: dict[str, dict[str, Any]] = {
    "plain": document(2, 2),
    "more": document(2, 3),
    "less": document(2, 1),
    "other_spans": document(3, 2),
    "ranges": {
        **document(),
        "spans": {"ranges": [{"first": 0, "last": 2}, {"first": 2, "last": 8}]},
    },
    "automatic": {**document(), "spans": {}},
    "patched": document(2, 2, pools=[POOL]),
    "two_pools": document(2, 2, pools=[POOL, {"name": "b", "resources": {"limits": {"cpu": "1"}}}]),
    "short": document(2, 2, sessions={"maxLength": 512, "concurrent": 4}),
    "renamed": document(2, 2, model={"source": "demo://counting", "servedName": "other"}),
    "half": document(2, 2, model={"source": "demo://counting", "dtype": "bfloat16"}),
    "in_place": document(2, 2, rollout={"surge": 0, "drainLimit": "10s"}),
    "paused_then_not": document(2, 2, paused=False),
}


def roomy(spec: dict[str, Any]) -> World:
    return World(
        spec=copy.deepcopy(spec), nodes={f"n{i}": Node(f"n{i}", room=30) for i in range(3)}
    )


def end_state(world: World) -> Any:
    """Everything but numbers and times, pod by pod."""
    pods = sorted(
        (pod.view.labels[names.SLOT], _anonymous(pod.manifest)) for pod in world.servers()
    )
    children = {key: child["spec"] for key, child in world.children.items()}
    status = {key: world.status[key] for key in ("spansText", "coverage", "servedName", "model")}
    return pods, children, status, world.status["plan"]["spans"]


def _anonymous(manifest: dict[str, Any]) -> str:
    """Without number and name; without the pool's part, as which pool it is from depends on what was there before."""
    pod = copy.deepcopy(manifest)
    container = pod["spec"]["containers"][0]
    number = pod["metadata"]["labels"].pop(names.INCARNATION)
    assert container["args"][container["args"].index("--incarnation") + 1] == number
    container["args"].remove(number)
    for key in (names.TEMPLATE_HASH, names.POOL):
        pod["metadata"]["annotations"].pop(key)
    pod["metadata"]["labels"].pop("team", None)
    container.pop("resources")
    # The limit that its swarm had when it was made; the operator gives today's with the delete.
    pod["spec"].pop("terminationGracePeriodSeconds")
    del container["args"][container["args"].index("--drain-timeout") + 1]
    return json.dumps(pod, sort_keys=True).replace(pod["metadata"]["name"], "NAME")


@pytest.mark.parametrize("first", STATES)
def test_edited_swarm_ends_as_if_it_were_new(first: str) -> None:
    """Acto's oracle: from every state to every other, and back."""
    order = random.Random(first).sample(sorted(STATES), 3)
    world = roomy(STATES[first])
    world.settle()
    for name in [*order, first]:
        world.spec = copy.deepcopy(STATES[name])
        world.edit()
        world.settle(rounds=200)
        fresh = roomy(STATES[name])
        fresh.settle()
        assert end_state(world) == end_state(fresh)


def test_half_an_hour_without_operator_is_repaired() -> None:
    world = roomy(document(2, 3))
    world.settle()
    for name in world.ready()[:2]:
        world.vanish(name)
    world.fail(world.ready()[0])
    world.node_gone("n1")
    world.edit(replicas=2)
    world.edit(spans={"count": 4})
    for _ in range(18):
        world.pass_time(100.0)
    storm = Storm(world)
    assert storm.converge() < 120
    storm.check_end()


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_clock_jump_of_an_hour_causes_no_replacement(jump: float) -> None:
    world = roomy(document(2, 2))
    world.settle()
    world.fail(world.ready()[0])
    world.turn()
    started = world.now
    for number in range(40):
        world.pass_time()
        world.now += jump if number == 5 else -jump if number == 25 else 0.0
        for pod in world.pods.values():  # the cluster's clocks are right: only the operator's jumps
            pod.scheduled_at = min(pod.scheduled_at, world.now)
        world.turn()
    assert abs(world.now - started - 40.0) < 1.0
    assert len(world.ready()) == 4 and world.status["incarnation"] == 5


def test_lost_third_of_1000_servers_is_replaced_alone() -> None:
    nodes = {f"n{index}": Node(f"n{index}", room=200) for index in range(10)}
    world = World(spec=document(8, 125), nodes=nodes)
    world.settle()
    world.pass_time(100.0)
    for name in ("n1", "n4", "n7"):
        world.node_gone(name)
    good = set(world.ready()) & {p.name for p in world.servers() if p.view.node in world.nodes}
    lost = 1000 - len(good)
    rounds = world.settle()
    assert rounds < 40
    assert good <= set(world.pods) and len(world.ready()) == 1000
    assert world.status["incarnation"] == 1000 + lost


def test_two_hours_of_faults_leave_no_traces() -> None:
    """Soak: the status does not grow, and when the faults end so does the work."""
    draw = random.Random(2026)
    storm = Storm(World())
    started, sizes = storm.world.now, []
    while storm.world.now < started + 7200.0:
        storm.run([(draw.randrange(32), draw.randrange(61)) for _ in range(20)])
        sizes.append(len(json.dumps(storm.world.status)))
    assert max(sizes[len(sizes) // 2 :]) < 1.5 * max(sizes[: len(sizes) // 2]) + 1000
    storm.heal()
    storm.converge()
    storm.check_end()
    assert "slots" not in storm.world.status


def test_idle_day_writes_nothing() -> None:
    world = roomy(document(5, 2))
    world.settle()
    world.pass_time(700.0)
    world.turn()
    writes = world.writes
    for _ in range(24 * 60):
        world.now += 60.0
        decision = world.turn()
        assert not decision.actions and decision.requeue_at is None
    assert world.writes == writes
