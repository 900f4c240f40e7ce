"""Events: recorded once per transition, and few of them when many servers fail together."""

from __future__ import annotations

import pytest
from support.operator.model_cluster import ModelCluster, Node, make_spec

from modelswarm_operator.reconcile.state.observed import ContainerView


def test_event_is_recorded_once_per_transition() -> None:
    cluster = ModelCluster(spec=make_spec())
    cluster.settle()
    cluster.events.clear()
    cluster.delete_pod(cluster.ready_pods()[0])
    for _ in range(10):
        cluster.run_turn()
        cluster.pass_time()
    reasons = [event.reason for event in cluster.events]
    assert reasons.count("Replacing") == 1
    assert len(reasons) <= 3


def test_events_follow_the_transitions_of_a_swarm() -> None:
    cluster = ModelCluster(spec=make_spec(2, 1))
    cluster.settle()
    assert [event.reason for event in cluster.events] == ["Filling", "Planned", "Ready"]
    cluster.events.clear()
    container = ContainerView(
        exit_code=2, exit_reason="Error", exit_message="truncated", restarts=1
    )
    name = cluster.ready_pods()[0]
    cluster.set_pod(name, ready=False, container=container)
    cluster.run_turn()
    assert {(event.kind, event.reason) for event in cluster.events} == {
        ("Warning", "NotReady"),
        ("Warning", "WeightsFailed"),
        ("Normal", "Filling"),
    }
    cluster.events.clear()
    cluster.settle()
    assert {event.reason for event in cluster.events} == {"Ready", "Recovered"}


def test_mass_failure_records_few_events() -> None:
    nodes = {f"n{index}": Node(f"n{index}", capacity=100) for index in range(9)}
    cluster = ModelCluster(spec=make_spec(4, 20), nodes=nodes)
    cluster.settle()
    cluster.events.clear()
    for name in cluster.ready_pods()[:40]:
        cluster.fail_pod(name)
    cluster.run_turn()
    assert len(cluster.events) < 15
    assert any("more at the same time" in event.message for event in cluster.events)


@pytest.mark.parametrize(
    ("disruption", "reason"),
    [
        ("", "is being deleted"),
        ("DeletionByTaintManager", "is being deleted (DeletionByTaintManager)"),
    ],
)
def test_replacement_says_that_the_old_pod_is_being_deleted(disruption: str, reason: str) -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.settle()
    cluster.events.clear()
    [name] = cluster.ready_pods()
    cluster.set_pod(name, deleting_since=cluster.now, disruption=disruption)
    for _ in range(5):
        cluster.run_turn()
        cluster.pass_time()
    [event] = [event for event in cluster.events if event.reason == "Replacing"]
    assert event.message.endswith(f"gets a new server: pod {name} {reason}")


def test_replacement_says_that_the_node_is_departing() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1), nodes={n: Node(n, capacity=2) for n in ("a", "b")})
    cluster.settle()
    cluster.events.clear()
    [name] = cluster.ready_pods()
    node = cluster.pods[name].view.node
    cluster.nodes[node].departing = "cordoned"
    cluster.settle()
    [event] = [event for event in cluster.events if event.reason == "Replacing"]
    assert event.message.endswith(f"node {node} of pod {name} is departing")
