"""Nodes that fail, blink, leave or are given up: when servers are replaced, and which of two stays."""

from __future__ import annotations

from support.operator.model_cluster import POLICY, Node, World, document

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import DeletePod


def on_node(world: World, name: str) -> list[str]:
    return sorted(pod.name for pod in world.servers() if pod.view.node == name)


def aged(nodes: int = 4, spans: int = 2, replicas: int = 2) -> World:
    """Settled long enough for every grace of its beginning to be over."""
    named = {f"n{index}": Node(f"n{index}", room=20) for index in range(nodes)}
    world = World(spec=document(spans, replicas), nodes=named)
    world.settle()
    world.pass_time(120.0)
    return world


def run(world: World, seconds: int) -> None:
    for _ in range(seconds):
        world.pass_time()
        world.turn()


def test_pods_of_an_unready_node_are_replaced_and_kept() -> None:
    world = aged()
    lost = on_node(world, "n0")
    world.node_down("n0")
    run(world, int(POLICY.not_ready_grace) - 2)
    assert world.status["incarnation"] == 4
    assert world.wake_at == world.nodes["n0"].not_ready_since + POLICY.not_ready_grace  # type: ignore[operator]
    run(world, 10)
    assert world.status["incarnation"] == 4 + len(lost)
    assert set(lost) <= set(world.pods)
    assert world.condition("Degraded")["reason"] == "NodeNotReady"
    assert "n0" in world.condition("Degraded")["message"]
    world.settle()
    assert world.coverage() == 2


def test_pods_on_unready_nodes_are_replaced_only_once() -> None:
    """The scheduler may see nodes as ready when we do not, as after an outage of the API server."""
    world = aged(nodes=2)
    for name in world.nodes:
        world.node_down(name)
    world.pass_time(POLICY.not_ready_grace + 1)
    for _ in range(12):  # turns within three seconds
        world.pass_time(0.25)
        world.turn()
        for pod in world.servers():
            if not pod.view.node:
                world.set_pod(pod.name, node="n0", unschedulable="", scheduled=world.now)
    assert world.status["incarnation"] == 4 + 4, "each one once"


def test_returned_pod_is_removed_if_its_successor_is_ready() -> None:
    world = aged()
    lost = on_node(world, "n0")
    world.node_down("n0")
    run(world, 20)
    world.node_up("n0")
    world.settle()
    assert not set(lost) & set(world.pods)
    assert len(world.ready()) == 4
    assert world.condition("Degraded")["status"] == "False"


def test_returned_pod_stays_if_its_successor_is_not_ready() -> None:
    world = aged(nodes=2)
    for node in world.nodes.values():
        node.room = 2
    lost = on_node(world, "n0")
    world.node_down("n0")
    run(world, 20)
    assert any(pod.view.unschedulable for pod in world.pods.values())
    world.node_up("n0")
    world.settle()
    assert set(lost) <= set(world.pods)
    assert len(world.pods) == 4


def test_mass_node_outage_replaces_no_pods() -> None:
    world = aged(nodes=5, spans=4, replicas=2)
    for name in ("n0", "n1", "n2"):
        world.node_down(name)
    run(world, 120)
    assert world.status["incarnation"] == 8
    degraded = world.condition("Degraded")
    assert degraded["reason"] == "ManyNodesNotReady"
    assert "3 of 5 nodes" in degraded["message"]
    for name in ("n0", "n1", "n2"):
        world.node_up(name)
    world.settle()
    assert world.status["incarnation"] == 8


def test_mass_node_outage_replaces_pods_after_its_timeout() -> None:
    world = aged(nodes=5, spans=4, replicas=2)
    for name in ("n0", "n1", "n2"):
        world.node_down(name)
    world.turn()
    assert world.wake_at is not None
    world.pass_time(POLICY.mass_outage_timeout)
    run(world, 10)
    assert world.coverage() >= 1


def test_nodes_down_for_long_do_not_count_as_mass_outage() -> None:
    """Machines that were switched off and never deleted must not slow down every repair."""
    world = aged(nodes=3)
    for name in ("old-0", "old-1", "old-2", "old-3"):
        world.nodes[name] = Node(name, ready=False, not_ready_since=1.0)
    world.node_down("n0")
    run(world, 15)
    assert world.coverage() == 2
    assert world.condition("Degraded")["reason"] == "NodeNotReady"


def test_node_timestamp_in_the_future_delays_nothing() -> None:
    world = aged()
    world.node_down("n0")
    world.nodes["n0"].not_ready_since = world.now + 3600.0
    run(world, 3)
    assert world.condition("Degraded")["reason"] == "NodeNotReady"


def test_empty_node_list_deletes_no_pod() -> None:
    world = aged()
    world.nodes.clear()
    assert world.decide().actions == []


def test_pods_of_a_failed_third_of_the_nodes_are_replaced() -> None:
    world = aged(nodes=6, spans=4, replicas=2)
    for name in ("n0", "n1"):
        world.node_down(name)
    run(world, 15)
    assert world.coverage() == 2


def test_pods_of_a_deleted_node_are_force_deleted() -> None:
    world = aged()
    lost = on_node(world, "n0")
    world.node_gone("n0")
    deletes = [action for action in world.turn().actions if isinstance(action, DeletePod)]
    assert sorted(action.name for action in deletes) == lost
    assert {action.grace_seconds for action in deletes} == {0}
    world.settle()
    assert len(world.ready()) == 4


def test_pod_on_an_unknown_node_is_not_force_deleted() -> None:
    world = aged()
    name = world.ready()[0]
    world.kill(name)
    world.turn()
    world.pass_time()
    new = max(world.pods, key=names.incarnation_of_name)
    world.set_pod(new, node="n-brand-new")
    assert not [action for action in world.turn().actions if isinstance(action, DeletePod)]
    assert world.wake_at is not None and world.wake_at <= world.now + POLICY.unknown_node_grace


def test_out_of_service_node_releases_its_pods() -> None:
    world = aged()
    lost = on_node(world, "n0")
    world.node_down("n0")
    world.kill(lost[0])
    run(world, 10)
    assert lost[0] in world.pods
    world.nodes["n0"].out_of_service = True
    world.settle()
    assert lost[0] not in world.pods


def test_pod_stuck_on_a_dead_node_is_replaced_and_reported() -> None:
    world = aged()
    lost = on_node(world, "n0")[0]
    world.node_down("n0")
    world.kill(lost)
    run(world, 5)
    assert world.status["incarnation"] == 5
    world.pass_time(400.0)
    world.turn()
    degraded = world.condition("Degraded")
    assert "Pods do not end" in degraded["message"] and lost in degraded["message"]
    assert "out-of-service" in degraded["message"]
    assert lost in world.pods


def test_pods_of_a_cordoned_node_are_replaced_before_deletion() -> None:
    world = aged()
    leaving = on_node(world, "n1")
    world.nodes["n1"].departing = "cordoned"
    world.turn()
    assert set(leaving) <= set(world.ready())
    assert world.status["incarnation"] == 4 + len(leaving)
    least = 9
    for _ in range(20):
        world.turn()
        least = min(least, world.coverage())
        world.pass_time()
    assert least == 2
    assert not on_node(world, "n1")
    assert len(world.ready()) == 4


def test_pod_on_a_cordoned_node_stays_without_capacity() -> None:
    world = aged(nodes=2)
    for node in world.nodes.values():
        node.room = 2
    leaving = on_node(world, "n1")
    world.nodes["n1"].departing = "cordoned"
    run(world, 60)
    assert set(leaving) <= set(world.ready())
    assert world.condition("Degraded")["reason"] == "NoCapacity"
    world.nodes["n1"].departing = ""
    world.settle()
    assert len(world.pods) == 4


def test_without_node_access_only_pod_states_count() -> None:
    world = aged()
    world.sees_nodes = False
    world.node_down("n0")
    world.nodes["n1"].departing = "cordoned"
    run(world, 30)
    assert world.status["incarnation"] == 4
    assert world.coverage() == 1
    for name in on_node(world, "n0"):
        world.kill(name)  # the taint manager does, after five minutes
    run(world, 10)
    assert world.coverage() == 2
