"""The operator crashes after every action, or two operators act at once: no pod is duplicated, lost or left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
from support.operator.model_cluster import ModelCluster, Node, make_spec
from support.operator.random_faults import RandomFaults

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import Action, DeletePod

Change = Callable[[ModelCluster], None]


def create_swarm(cluster: ModelCluster) -> None:
    """Change nothing: the test starts with the creation of the swarm."""


def scale_up(cluster: ModelCluster) -> None:
    cluster.edit_spec(replicas=3)


def scale_down(cluster: ModelCluster) -> None:
    cluster.edit_spec(replicas=1)


def change_template(cluster: ModelCluster) -> None:
    cluster.edit_spec(
        pools=[{"name": "only", "podTemplate": {"metadata": {"labels": {"team": "x"}}}}]
    )


def change_spans(cluster: ModelCluster) -> None:
    cluster.edit_spec(spans={"count": 3})


def change_served_name(cluster: ModelCluster) -> None:
    cluster.edit_spec(model={"source": "demo://counting", "servedName": "other"})


def scale_to_zero(cluster: ModelCluster) -> None:
    cluster.edit_spec(replicas=0)


def delete_node(cluster: ModelCluster) -> None:
    cluster.delete_node("n0")


def cordon_node(cluster: ModelCluster) -> None:
    cluster.nodes["n1"].departing = "cordoned"


def lose_pods(cluster: ModelCluster) -> None:
    cluster.delete_pod(cluster.ready_pods(0)[0])
    cluster.fail_pod(cluster.ready_pods(1)[0])


def delete_swarm(cluster: ModelCluster) -> None:
    cluster.delete_swarm()


CHANGES: list[Change] = [
    create_swarm, scale_up, scale_down, change_template, change_spans, change_served_name,
    scale_to_zero, delete_node, cordon_node, lose_pods, delete_swarm,
]  # fmt: skip


class CrashingOperator:
    """An operator that crashes after `crash_after` actions and restarts; -1: it never crashes."""

    def __init__(self, cluster: ModelCluster, crash_after: int) -> None:
        self.cluster, self.actions_left = cluster, crash_after
        self.actions_done = 0

    def run_turn(self) -> bool:
        """Run one turn; return True if it had work."""
        seen = self.cluster.observe()
        actions = list(self.cluster.decide(seen).actions)
        for action in actions:
            if self.actions_left == 0:
                self.actions_left = -1
                return True
            if not self._execute_action(action, seen):
                break
        return bool(actions)

    def _execute_action(self, action: Action, seen: object) -> bool:
        self.actions_left -= 1
        self.actions_done += 1
        return self.cluster.execute_action(action, seen)  # type: ignore[arg-type]


def make_changed_cluster(change: Change) -> ModelCluster:
    nodes = {name: Node(name, capacity=6) for name in ("n0", "n1", "n2", "n3")}
    cluster = ModelCluster(spec=make_spec(2, 2), nodes=nodes)
    if change is not create_swarm:
        cluster.settle()
        cluster.pass_time(60.0)
        cluster.log.clear()
    change(cluster)
    return cluster


def run_operators(cluster: ModelCluster, crash_after: int) -> CrashingOperator:
    operator = CrashingOperator(cluster, crash_after)
    quiet = 0
    for _ in range(200):
        busy = operator.run_turn() if cluster.exists else False
        quiet = 0 if busy else quiet + 1
        if quiet > 8:
            return operator
        cluster.pass_time()
    raise AssertionError(f"not idle: {cluster.log[-10:]} {cluster.pending_actions()}")


def count_creates(cluster: ModelCluster) -> int:
    return sum(line.startswith("create") for line in cluster.log)


def count_deletes(cluster: ModelCluster) -> int:
    return sum(line.startswith("delete") for line in cluster.log)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_operator_crash_after_any_action_keeps_the_end_state(change: Change) -> None:
    clean = make_changed_cluster(change)
    actions = run_operators(clean, -1).actions_done
    for crash_after in range(actions):
        cluster = make_changed_cluster(change)
        run_operators(cluster, crash_after)
        assert cluster.exists == clean.exists
        assert len(cluster.pods) == len(clean.pods), (crash_after, cluster.log)
        if cluster.exists:
            RandomFaults(cluster).check_end_state()
        assert count_creates(cluster) == count_creates(clean), (crash_after, cluster.log)
        assert count_deletes(cluster) <= count_deletes(clean) + 1, (crash_after, cluster.log)
        assert not cluster.pods or cluster.exists


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_two_concurrent_operators_reach_the_same_end_state(change: Change) -> None:
    """Both observe the same state, and their actions alternate from every offset."""
    clean = make_changed_cluster(change)
    run_operators(clean, -1)
    for offset in range(8):
        cluster = make_changed_cluster(change)
        quiet = 0
        for _ in count():
            if not cluster.exists:
                break
            quiet = 0 if _interleave_turns(cluster, offset) else quiet + 1
            if quiet > 8:
                break
            cluster.pass_time()
            assert cluster.now < 1_001_000.0, (cluster.log[-10:], cluster.pending_actions())
        assert cluster.exists == clean.exists
        assert len(cluster.pods) == len(clean.pods)
        if cluster.exists:
            RandomFaults(cluster).check_end_state()
        assert count_creates(cluster) <= count_creates(clean) + 1, cluster.log


def _interleave_turns(cluster: ModelCluster, offset: int) -> bool:
    """Run two turns on one observation with alternating actions; return True if they had work."""
    seen = cluster.observe()
    first, second = list(cluster.decide(seen).actions), list(cluster.decide(seen).actions)
    continues = {0: True, 1: True}
    order = [(0, action) for action in first[:offset]]
    rest = first[offset:]
    for index in range(max(len(rest), len(second))):
        order += [(1, action) for action in second[index : index + 1]]
        order += [(0, action) for action in rest[index : index + 1]]
    for operator, action in order:
        if continues[operator] and cluster.exists:
            continues[operator] = cluster.execute_action(action, seen)
    return bool(first)


def test_stale_pod_list_creates_no_second_pod() -> None:
    """A stale list lacks the created pods, so the same names are posted again."""
    cluster = ModelCluster()
    cluster.run_turn()
    for _ in range(3):
        cluster.run_turn(replace(cluster.observe(), pods=()))
    assert len(cluster.pods) == 4
    assert cluster.status["incarnation"] == 4


def test_stale_empty_pod_list_creates_a_surplus_that_is_removed() -> None:
    """Ready pods that are not listed count as deleted; the surplus is removed later."""
    cluster = ModelCluster()
    cluster.settle()
    good = set(cluster.pods)
    cluster.run_turn(replace(cluster.observe(), pods=()))
    assert (
        len(cluster.pods) == 8
        and len({names.incarnation_of_name(name) for name in cluster.pods}) == 8
    )
    cluster.settle()
    assert good == set(cluster.pods)


def test_operator_with_a_stale_swarm_deletes_nothing() -> None:
    """The stale operator would undo a scale-up, but its status write conflicts first."""
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.settle()
    old = cluster.observe()
    cluster.edit_spec(replicas=2)
    cluster.settle()
    late = replace(old, pods=cluster.observe().pods)
    assert [action for action in cluster.decide(late).actions if isinstance(action, DeletePod)]
    cluster.run_turn(late)
    assert len(cluster.ready_pods()) == 2 and cluster.log[-1] == "conflict"
