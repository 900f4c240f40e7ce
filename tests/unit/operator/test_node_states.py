"""Nodes that fail, recover, are cordoned or deleted: replacement of pods, and the choice between two pods."""

from __future__ import annotations

from typing import Any

import pytest
from support.operator.model_cluster import POLICY, ModelCluster, Node, make_spec

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import CreatePod, DeletePod


def list_pods_on_node(cluster: ModelCluster, name: str) -> list[str]:
    return sorted(pod.name for pod in cluster.server_pods() if pod.view.node == name)


def make_old_cluster(nodes: int = 4, spans: int = 2, replicas: int = 2) -> ModelCluster:
    """Return a settled cluster whose pods are older than every grace period."""
    named = {f"n{index}": Node(f"n{index}", capacity=20) for index in range(nodes)}
    cluster = ModelCluster(spec=make_spec(spans, replicas), nodes=named)
    cluster.settle()
    cluster.pass_time(120.0)
    return cluster


def run_turns(cluster: ModelCluster, seconds: int) -> None:
    for _ in range(seconds):
        cluster.pass_time()
        cluster.run_turn()


def test_pods_of_an_unready_node_are_replaced_and_kept() -> None:
    cluster = make_old_cluster()
    lost = list_pods_on_node(cluster, "n0")
    cluster.set_node_not_ready("n0")
    run_turns(cluster, int(POLICY.not_ready_grace) - 2)
    assert cluster.status["incarnation"] == 4
    assert cluster.wake_at == cluster.nodes["n0"].not_ready_since + POLICY.not_ready_grace  # type: ignore[operator]
    run_turns(cluster, 10)
    assert cluster.status["incarnation"] == 4 + len(lost)
    assert set(lost) <= set(cluster.pods)
    assert cluster.condition("Degraded")["reason"] == "NodeNotReady"
    assert "n0" in cluster.condition("Degraded")["message"]
    cluster.settle()
    assert cluster.coverage() == 2


def test_long_served_pods_of_a_lost_node_are_no_slow_starts() -> None:
    cluster = make_old_cluster()
    cluster.pass_time(POLICY.slow_start)
    cluster.set_node_not_ready("n0")
    run_turns(cluster, 10)
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "NodeNotReady" and "minutes" not in degraded["message"]


def test_pods_on_unready_nodes_are_replaced_only_once() -> None:
    """After an API server outage the scheduler may see nodes as ready before our cache does."""
    cluster = make_old_cluster(nodes=2)
    for name in cluster.nodes:
        cluster.set_node_not_ready(name)
    cluster.pass_time(POLICY.not_ready_grace + 1)
    for _ in range(12):  # turns within three seconds
        cluster.pass_time(0.25)
        cluster.run_turn()
        for pod in cluster.server_pods():
            if not pod.view.node:
                cluster.set_pod(pod.name, node="n0", unschedulable="", scheduled=cluster.now)
    assert cluster.status["incarnation"] == 4 + 4, "each pod is replaced once"


def test_returned_pod_is_removed_if_its_successor_is_ready() -> None:
    cluster = make_old_cluster()
    lost = list_pods_on_node(cluster, "n0")
    cluster.set_node_not_ready("n0")
    run_turns(cluster, 20)
    cluster.set_node_ready("n0")
    cluster.settle()
    assert not set(lost) & set(cluster.pods)
    assert len(cluster.ready_pods()) == 4
    assert cluster.condition("Degraded")["status"] == "False"


def test_returned_pod_stays_if_its_successor_is_not_ready() -> None:
    cluster = make_old_cluster(nodes=2)
    for node in cluster.nodes.values():
        node.capacity = 2
    lost = list_pods_on_node(cluster, "n0")
    cluster.set_node_not_ready("n0")
    run_turns(cluster, 20)
    assert any(pod.view.unschedulable for pod in cluster.pods.values())
    cluster.set_node_ready("n0")
    cluster.settle()
    assert set(lost) <= set(cluster.pods)
    assert len(cluster.pods) == 4


def test_mass_node_outage_replaces_no_pods() -> None:
    cluster = make_old_cluster(nodes=5, spans=4, replicas=2)
    for name in ("n0", "n1", "n2"):
        cluster.set_node_not_ready(name)
    run_turns(cluster, 120)
    assert cluster.status["incarnation"] == 8
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "ManyNodesNotReady"
    assert "3 of 5 nodes" in degraded["message"]
    for name in ("n0", "n1", "n2"):
        cluster.set_node_ready(name)
    cluster.settle()
    assert cluster.status["incarnation"] == 8


def test_mass_node_outage_replaces_pods_after_its_timeout() -> None:
    cluster = make_old_cluster(nodes=5, spans=4, replicas=2)
    for name in ("n0", "n1", "n2"):
        cluster.set_node_not_ready(name)
    cluster.run_turn()
    assert cluster.wake_at is not None
    cluster.pass_time(POLICY.mass_outage_timeout)
    run_turns(cluster, 10)
    assert cluster.coverage() >= 1


def test_nodes_down_for_long_do_not_count_as_mass_outage() -> None:
    """Nodes that are switched off forever must not delay replacements."""
    cluster = make_old_cluster(nodes=3)
    for name in ("old-0", "old-1", "old-2", "old-3"):
        cluster.nodes[name] = Node(name, ready=False, not_ready_since=1.0)
    cluster.set_node_not_ready("n0")
    run_turns(cluster, 15)
    assert cluster.coverage() == 2
    assert cluster.condition("Degraded")["reason"] == "NodeNotReady"


def test_node_timestamp_in_the_future_delays_nothing() -> None:
    cluster = make_old_cluster()
    cluster.set_node_not_ready("n0")
    cluster.nodes["n0"].not_ready_since = cluster.now + 3600.0
    run_turns(cluster, 3)
    assert cluster.condition("Degraded")["reason"] == "NodeNotReady"


def test_slow_clock_delays_no_replacement_on_a_lost_node() -> None:
    cluster = make_old_cluster()
    for pod in cluster.server_pods():
        later = cluster.now + 3600.0
        cluster.set_pod(pod.name, created=later, scheduled=later)
    lost = list_pods_on_node(cluster, "n0")
    cluster.set_node_not_ready("n0")
    run_turns(cluster, int(POLICY.not_ready_grace) + 1)
    assert cluster.status["incarnation"] == 4 + len(lost)


def test_empty_node_list_deletes_no_pod() -> None:
    cluster = make_old_cluster()
    cluster.nodes.clear()
    assert cluster.decide().actions == []


def test_pods_of_a_failed_third_of_the_nodes_are_replaced() -> None:
    cluster = make_old_cluster(nodes=6, spans=4, replicas=2)
    for name in ("n0", "n1"):
        cluster.set_node_not_ready(name)
    run_turns(cluster, 15)
    assert cluster.coverage() == 2


def test_pods_of_a_deleted_node_are_force_deleted() -> None:
    cluster = make_old_cluster()
    lost = list_pods_on_node(cluster, "n0")
    cluster.delete_node("n0")
    deletes = [action for action in cluster.run_turn().actions if isinstance(action, DeletePod)]
    assert sorted(action.name for action in deletes) == lost
    assert {action.grace_seconds for action in deletes} == {0}
    cluster.settle()
    assert len(cluster.ready_pods()) == 4


def test_pod_on_an_unknown_node_is_not_force_deleted() -> None:
    cluster = make_old_cluster()
    name = cluster.ready_pods()[0]
    cluster.delete_pod(name)
    cluster.run_turn()
    cluster.pass_time()
    new = max(cluster.pods, key=names.incarnation_of_name)
    cluster.set_pod(new, node="n-brand-new")
    assert not [action for action in cluster.run_turn().actions if isinstance(action, DeletePod)]
    assert (
        cluster.wake_at is not None and cluster.wake_at <= cluster.now + POLICY.unknown_node_grace
    )


def test_out_of_service_node_releases_its_pods() -> None:
    cluster = make_old_cluster()
    lost = list_pods_on_node(cluster, "n0")
    cluster.set_node_not_ready("n0")
    cluster.delete_pod(lost[0])
    run_turns(cluster, 10)
    assert lost[0] in cluster.pods
    cluster.nodes["n0"].out_of_service = True
    cluster.settle()
    assert lost[0] not in cluster.pods


def test_pod_stuck_on_a_dead_node_is_replaced_and_reported() -> None:
    cluster = make_old_cluster()
    lost = list_pods_on_node(cluster, "n0")[0]
    cluster.set_node_not_ready("n0")
    cluster.delete_pod(lost)
    run_turns(cluster, 5)
    assert cluster.status["incarnation"] == 5
    cluster.pass_time(400.0)
    cluster.run_turn()
    degraded = cluster.condition("Degraded")
    assert "Pods do not end" in degraded["message"] and lost in degraded["message"]
    assert "out-of-service" in degraded["message"]
    assert lost in cluster.pods


def test_pod_within_its_own_longer_grace_period_is_not_stuck() -> None:
    """The grace period is the drain limit of the spec with which the pod was created."""
    cluster = make_old_cluster()
    cluster.edit_spec(rollout={"drainTimeout": "1m"})
    name = cluster.ready_pods()[0]
    cluster.set_node_not_ready(cluster.pods[name].view.node)
    cluster.set_pod(name, deleting_since=cluster.now, deleting_until=cluster.now + 1800.0)
    cluster.pass_time(1800.0)
    cluster.run_turn()
    assert "Pods do not end" not in cluster.condition("Degraded")["message"]
    cluster.pass_time(POLICY.stuck_after)
    cluster.run_turn()
    assert "Pods do not end" in cluster.condition("Degraded")["message"]


def test_pods_of_a_cordoned_node_are_replaced_before_deletion() -> None:
    cluster = make_old_cluster()
    leaving = list_pods_on_node(cluster, "n1")
    cluster.nodes["n1"].departing = "cordoned"
    cluster.run_turn()
    assert set(leaving) <= set(cluster.ready_pods())
    assert cluster.status["incarnation"] == 4 + len(leaving)
    lowest_coverage = 9
    for _ in range(20):
        cluster.run_turn()
        lowest_coverage = min(lowest_coverage, cluster.coverage())
        cluster.pass_time()
    assert lowest_coverage == 2
    assert not list_pods_on_node(cluster, "n1")
    assert len(cluster.ready_pods()) == 4


def test_old_server_of_a_departing_node_awaits_no_turn() -> None:
    """A spot notice leaves two minutes; a rollout of large models takes longer for each slot."""
    cluster = make_old_cluster(spans=1, replicas=3)
    leaving = next(pod for pod in cluster.server_pods() if pod.view.labels[names.SLOT] == "0-2")
    labels = {"metadata": {"labels": {"team": "a"}}}
    cluster.edit_spec(pools=[{"name": "a", "podTemplate": labels}])
    cluster.nodes[leaving.view.node].departing = "aws-node-termination-handler/spot-itn"
    created = [one.slot for one in cluster.run_turn().actions if isinstance(one, CreatePod)]
    assert created == ["0-2"]
    assert leaving.name in cluster.ready_pods(), "it serves until its successor does"
    cluster.settle()
    assert {"0-0", "0-1", "0-2"} == {pod.view.labels[names.SLOT] for pod in cluster.server_pods()}


def test_pod_on_a_cordoned_node_stays_without_capacity() -> None:
    cluster = make_old_cluster(nodes=2)
    for node in cluster.nodes.values():
        node.capacity = 2
    leaving = list_pods_on_node(cluster, "n1")
    cluster.nodes["n1"].departing = "cordoned"
    run_turns(cluster, 60)
    assert set(leaving) <= set(cluster.ready_pods())
    assert cluster.condition("Degraded")["reason"] == "NoCapacity"
    cluster.nodes["n1"].departing = ""
    cluster.settle()
    assert len(cluster.pods) == 4


@pytest.mark.parametrize(
    ("trouble", "state"),
    [
        ({"departing": "cordoned"}, "departing"),
        ({"ready": False, "not_ready_since": 0.0}, "unreachable"),
        ({"ready": False, "out_of_service": True}, "deleted"),
    ],
)
def test_pods_that_tolerate_a_lost_node_are_created_slowly(
    trouble: dict[str, Any], state: str
) -> None:
    """With `tolerations: [{operator: Exists}]` each successor is placed on the same node again."""
    cluster = make_old_cluster(nodes=1, spans=1, replicas=1)
    cluster.tolerates_all_taints = True
    for name, value in trouble.items():
        setattr(cluster.nodes["n0"], name, value)
    run_turns(cluster, 600)
    assert cluster.status["incarnation"] < 20
    assert f"on node n0, which is {state}" in cluster.condition("Degraded")["message"]
    for name in ("ready", "departing", "out_of_service"):
        setattr(cluster.nodes["n0"], name, getattr(Node("n0"), name))
    run_turns(cluster, 310)
    assert len(cluster.ready_pods()) == 1


def test_without_node_access_only_pod_states_count() -> None:
    cluster = make_old_cluster()
    cluster.can_read_nodes = False
    cluster.set_node_not_ready("n0")
    cluster.nodes["n1"].departing = "cordoned"
    run_turns(cluster, 30)
    assert cluster.status["incarnation"] == 4
    assert cluster.coverage() == 1
    for name in list_pods_on_node(cluster, "n0"):
        cluster.delete_pod(name)  # as the taint manager does after five minutes
    run_turns(cluster, 10)
    assert cluster.coverage() == 2
