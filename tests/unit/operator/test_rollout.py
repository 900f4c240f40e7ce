"""Edits of the spec: template, scale, spans, model. No block loses its coverage during a rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.operator.model_cluster import POLICY, ModelCluster, Node, Pod, make_spec

from modelswarm.resources.spec import Spec
from modelswarm_operator.reconcile.pods.rollout import max_waiting
from modelswarm_operator.reconcile.pods.slot_state import SlotState
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import CreatePod, DeletePod
from modelswarm_operator.reconcile.state.names import SlotKey
from modelswarm_operator.reconcile.state.observed import ContainerView
from modelswarm_operator.reconcile.state.turn import Turn


def make_pools(value: str) -> list[dict[str, Any]]:
    return [{"name": "only", "podTemplate": {"metadata": {"labels": {"team": value}}}}]


def make_large_cluster(spans: int = 2, replicas: int = 2, **more: Any) -> ModelCluster:
    nodes = {name: Node(name, capacity=20) for name in ("n0", "n1", "n2")}
    cluster = ModelCluster(spec=make_spec(spans, replicas, **more), nodes=nodes)
    cluster.settle()
    return cluster


def run_turns(cluster: ModelCluster, check: Callable[[], None], seconds: int = 60) -> None:
    for _ in range(seconds):
        cluster.run_turn()
        check()
        cluster.pass_time()


def test_rollout_replaces_one_slot_per_span_and_surges_first() -> None:
    cluster = make_large_cluster(2, 3)
    old = set(cluster.pods)
    cluster.edit_spec(pools=make_pools("a"))
    pod_counts: list[int] = []

    def check() -> None:
        assert cluster.coverage() >= 3
        for span in (0, 1):
            pods = [p for p in cluster.server_pods() if p.view.labels[names.SPAN] == str(span)]
            pod_counts.append(sum(p.view.deleting_since is None for p in pods))

    run_turns(cluster, check)
    assert max(pod_counts) == 4
    assert not old & set(cluster.pods) and len(cluster.ready_pods()) == 6
    assert all(pod.manifest["metadata"]["labels"]["team"] == "a" for pod in cluster.server_pods())
    cluster.settle()


def test_change_of_the_memory_of_passes_is_rolled_out() -> None:
    cluster = make_large_cluster(2, 2)
    old = set(cluster.pods)
    cluster.edit_spec(training={})
    run_turns(cluster, lambda: assert_coverage(cluster, 2), 20)
    assert set(cluster.pods) == old
    for memory in ("1Gi", "2Gi"):
        old = set(cluster.pods)
        cluster.edit_spec(training={"memory": memory})
        run_turns(cluster, lambda: assert_coverage(cluster, 2))
        assert not old & set(cluster.pods) and len(cluster.ready_pods()) == 4
        for pod in cluster.server_pods():
            assert "--training-memory" in pod.manifest["spec"]["containers"][0]["args"]


def test_single_replica_rolls_without_a_gap_despite_surge_0() -> None:
    cluster = make_large_cluster(2, 1, rollout={"surge": 0})
    cluster.edit_spec(pools=make_pools("a"))
    run_turns(cluster, lambda: assert_coverage(cluster, 1), 30)
    assert len(cluster.pods) == 2
    assert all(pod.manifest["metadata"]["labels"]["team"] == "a" for pod in cluster.server_pods())


def test_rollout_with_surge_0_deletes_before_it_creates() -> None:
    cluster = make_large_cluster(1, 3, rollout={"surge": 0})
    cluster.edit_spec(pools=make_pools("a"))

    def check() -> None:
        assert cluster.coverage() >= 2
        assert sum(pod.view.deleting_since is None for pod in cluster.server_pods()) <= 3

    run_turns(cluster, check, 40)
    assert all(pod.manifest["metadata"]["labels"]["team"] == "a" for pod in cluster.server_pods())
    assert len(cluster.ready_pods()) == 3


def test_rollout_without_capacity_continues_at_surge_0() -> None:
    cluster = ModelCluster(spec=make_spec(1, 2), nodes={"n0": Node("n0", capacity=2)})
    cluster.settle()
    cluster.edit_spec(pools=make_pools("a"))
    run_turns(cluster, lambda: assert_coverage(cluster, 2), 15)
    assert cluster.condition("Degraded")["reason"] == "NoCapacity"
    cluster.edit_spec(rollout={"surge": 0})
    run_turns(cluster, lambda: assert_coverage(cluster, 1), 40)
    assert all(pod.manifest["metadata"]["labels"]["team"] == "a" for pod in cluster.server_pods())


def test_failing_template_stops_the_rollout_and_keeps_old_pods() -> None:
    cluster = make_large_cluster(2, 3)
    good = set(cluster.ready_pods())
    cluster.is_crashing = lambda pod: pod.name not in good
    cluster.edit_spec(pools=make_pools("bad"))
    run_turns(cluster, lambda: assert_coverage(cluster, 3), 200)
    assert good <= set(cluster.ready_pods())
    assert len(cluster.pods) <= 8
    cluster.edit_spec(pools=[])
    cluster.settle()
    assert set(cluster.pods) == good


def test_corrected_template_of_unready_pods_rolls_out_at_once() -> None:
    cluster = ModelCluster(spec=make_spec(1, 2, pools=make_pools("bad")))
    cluster.is_crashing = lambda pod: pod.manifest["metadata"]["labels"].get("team") == "bad"
    run_turns(cluster, lambda: None, 20)
    cluster.edit_spec(pools=make_pools("good"))
    run_turns(cluster, lambda: None, 8)
    assert len(cluster.ready_pods()) == 2


def test_scale_up_adds_and_scale_down_removes_highest_ordinals() -> None:
    cluster = make_large_cluster(2, 2)
    cluster.edit_spec(replicas=3)
    cluster.settle()
    assert len(cluster.ready_pods(0)) == len(cluster.ready_pods(1)) == 3
    cluster.edit_spec(replicas=1)
    cluster.settle()
    assert sorted(pod.view.labels[names.SLOT] for pod in cluster.server_pods()) == ["0-0", "1-0"]


def test_scale_down_removes_unready_pods_first() -> None:
    cluster = make_large_cluster(1, 3)
    broken = cluster.ready_pods()[0]
    cluster.set_pod(broken, ready=False)
    cluster.is_crashing = lambda pod: pod.name == broken
    cluster.edit_spec(replicas=2)
    cluster.settle()
    assert broken not in cluster.pods
    assert len(cluster.ready_pods()) == 2
    assert cluster.status["incarnation"] == 3


def test_replica_changes_never_reuse_an_incarnation() -> None:
    cluster = ModelCluster(spec=make_spec(1, 3), nodes={"n0": Node("n0", capacity=1)})
    run_turns(cluster, lambda: None, 5)
    cluster.edit_spec(replicas=2)
    cluster.run_turn()
    cluster.edit_spec(replicas=3)
    cluster.run_turn()
    assert len(cluster.used_incarnations) == len(set(cluster.used_incarnations)) == 4
    cluster.nodes["n0"].capacity = 9
    cluster.settle()
    assert len(cluster.ready_pods()) == 3


def test_scale_down_keeps_a_starting_pod_before_an_empty_slot() -> None:
    cluster = ModelCluster(spec=make_spec(1, 2))
    cluster.run_turn()
    failing, starting = (pod.name for pod in cluster.server_pods())
    for _ in range(2):  # the second failure makes its slot wait
        cluster.fail_pod(failing)
        cluster.run_turn()
        failing = max(cluster.pods, key=names.incarnation_of_name)
    assert set(cluster.pods) == {starting}
    cluster.edit_spec(replicas=1)
    cluster.settle()
    assert cluster.ready_pods() == [starting]


def test_zero_replicas_suspend_the_swarm_until_scaled_up() -> None:
    cluster = make_large_cluster()
    cluster.edit_spec(replicas=0)
    cluster.settle()
    assert not cluster.pods
    assert cluster.condition("Ready")["reason"] == "Suspended"
    assert cluster.condition("Degraded")["status"] == "False"
    assert [kind for kind, _ in cluster.children] == ["Service"]
    cluster.edit_spec(replicas=2)
    cluster.settle()
    assert len(cluster.ready_pods()) == 4


def test_new_spans_serve_before_old_ones_are_deleted() -> None:
    cluster = make_large_cluster(2, 2)
    old = set(cluster.pods)
    cluster.edit_spec(spans={"count": 3})
    cluster.run_turn()
    assert len(cluster.pods) == 4 + 3  # one pod per new span, the surge
    run_turns(cluster, lambda: assert_coverage(cluster, 2), 60)
    assert not old & set(cluster.pods)
    assert cluster.status["spansText"] == "0:3=2/2 3:6=2/2 6:8=2/2"
    cluster.settle()


def test_plan_is_stored_before_use_and_kept() -> None:
    cluster = make_large_cluster()
    cluster.edit_spec(spans={})
    cluster.run_turn(max_actions=1)
    stored = cluster.status["plan"]
    assert [span["last"] for span in stored["spans"]] == [8]
    cluster.settle()
    assert cluster.status["plan"] == stored


def test_plan_of_an_operator_with_fewer_memory_parts_is_kept() -> None:
    """A new plan would move spans or pages, and replace every server at an upgrade of the operator."""
    cluster = ModelCluster()
    cluster.settle()
    plan = cluster.status["plan"]
    plan["dtypeReason"] = "as an earlier version says"
    del plan["spans"][0]["memory"]["grammars"]
    cluster.run_turn()
    assert cluster.status["plan"] == plan


def test_new_served_name_is_ready_before_old_pods_are_deleted() -> None:
    cluster = make_large_cluster(2, 1)
    old = set(cluster.pods)
    cluster.edit_spec(model={"source": "demo://counting", "servedName": "other"})

    def check() -> None:
        generations: dict[str, set[str]] = {}
        for pod in cluster.server_pods():
            if pod.view.ready and pod.view.deleting_since is None:
                generation = pod.view.annotations[names.MODEL_HASH]
                generations.setdefault(generation, set()).add(pod.view.annotations[names.BLOCKS])
        assert {"0:4", "4:8"} in generations.values()

    run_turns(cluster, check, 30)
    assert not old & set(cluster.pods) and len(cluster.ready_pods()) == 2


def test_new_heads_without_tails_replace_no_old_route() -> None:
    """Servers of different models share no route, so three new heads and one new tail serve as one server of each."""
    cluster = make_large_cluster(2, 3, rollout={"surge": 3})
    new_tails: set[str] = set()

    def is_late(pod: Pod) -> bool:
        notes, labels = pod.view.annotations, pod.view.labels
        if notes[names.SERVED_NAME] == "new" and labels[names.SPAN] == "1":
            new_tails.add(pod.name)
        return pod.name in new_tails and pod.name != min(new_tails, key=names.incarnation_of_name)

    cluster.is_crashing = is_late
    cluster.edit_spec(model={"source": "demo://counting", "servedName": "new"})
    run_turns(cluster, lambda: None, 20)
    routes: dict[str, list[int]] = {}
    for pod in cluster.server_pods():
        if pod.view.ready and pod.view.deleting_since is None:
            counts = routes.setdefault(pod.view.annotations[names.SERVED_NAME], [0, 0])
            counts[int(pod.view.labels[names.SPAN])] += 1
    assert {name: min(counts) for name, counts in routes.items()} == {"counting": 2, "new": 1}


def miss_probes(cluster: ModelCluster, name: str, seconds: float = 0.0) -> None:
    """Let a server that has served for a minute be unready for so many seconds."""
    container = ContainerView(started=True, running_since=cluster.now - 60.0)
    cluster.set_pod(name, ready=False, unready_since=cluster.now - seconds, container=container)


def make_cluster_without_successors(**changes: Any) -> tuple[ModelCluster, str]:
    """Return a cluster in which no successor of the first spec's servers gets ready, and one of these."""
    cluster = make_large_cluster(2, 1)
    cluster.pass_time(120.0)
    old = cluster.ready_pods()
    cluster.is_crashing = lambda pod: pod.name not in old
    cluster.edit_spec(**changes)
    run_turns(cluster, lambda: None, 3)
    return cluster, old[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"source": "demo://counting", "servedName": "new"}},
        {"spans": {"count": 4}},
        {"pools": make_pools("a")},
    ],
)
def test_old_server_that_misses_probes_outlives_a_rollout(changes: dict[str, Any]) -> None:
    cluster, old = make_cluster_without_successors(**changes)
    miss_probes(cluster, old)
    cluster.run_turn()
    assert cluster.pods[old].view.deleting_since is None
    assert cluster.wake_at is not None and cluster.wake_at <= cluster.now + POLICY.unready_grace
    miss_probes(cluster, old, POLICY.unready_grace)
    cluster.run_turn()
    assert cluster.pods[old].view.deleting_since is not None


def test_cordoned_server_that_misses_probes_stays() -> None:
    cluster, old = make_cluster_without_successors()
    cluster.nodes[cluster.pods[old].view.node].departing = "cordoned"
    cluster.run_turn()
    miss_probes(cluster, old)
    cluster.run_turn()
    assert cluster.pods[old].view.deleting_since is None


def test_model_without_a_route_gives_its_room_to_the_next() -> None:
    """A model whose tail crashes is corrected in a cluster with room for one more server of each span."""
    nodes = {name: Node(name, capacity=3) for name in ("n0", "n1")}
    cluster = ModelCluster(spec=make_spec(2, 2), nodes=nodes)
    cluster.settle()
    cluster.is_crashing = lambda pod: (
        pod.view.annotations[names.SERVED_NAME] == "bad" and pod.view.labels[names.SPAN] == "1"
    )
    for name in ("bad", "good"):
        cluster.edit_spec(model={"source": "demo://counting", "servedName": name})
        run_turns(cluster, lambda: assert_coverage(cluster, 1), 60)
    served = [pod.view.annotations[names.SERVED_NAME] for pod in cluster.server_pods()]
    assert served == ["good"] * 4 and len(cluster.ready_pods()) == 4


@pytest.mark.parametrize("change", [{"rollout": {"surge": 0}}, {"replicas": 1}])
def test_new_model_gets_room_in_a_full_cluster(change: dict[str, Any]) -> None:
    """The other way would be to suspend the swarm: the old model keeps one whole route, and no second one."""
    cluster = ModelCluster(spec=make_spec(2, 2), nodes={"n0": Node("n0", capacity=4)})
    cluster.settle()
    cluster.edit_spec(model={"source": "demo://counting", "servedName": "new"})
    run_turns(cluster, lambda: assert_coverage(cluster, 2), 20)
    assert cluster.condition("Degraded")["reason"] == "NoCapacity"
    cluster.edit_spec(**change)
    run_turns(cluster, lambda: assert_coverage(cluster, 1), 60)
    assert {pod.view.annotations[names.SERVED_NAME] for pod in cluster.server_pods()} == {"new"}
    assert cluster.condition("Progressing")["reason"] == "Settled"


def test_new_spans_get_room_of_a_used_up_quota_without_surge() -> None:
    cluster = ModelCluster(quota=4)
    cluster.settle()
    cluster.edit_spec(spans={"count": 1}, rollout={"surge": 0})
    run_turns(cluster, lambda: assert_coverage(cluster, 1), 900)
    assert cluster.condition("Progressing")["reason"] == "Settled"


def test_rejection_that_is_over_asks_for_no_room() -> None:
    """A slot keeps its last failure's words for some time after a server has succeeded."""
    spec = Spec.model_validate(make_spec(2, 2, rollout={"surge": 0}))
    state = SlotState(SlotKey(0, 0), None, None, (), (), (), (), (), (), None)
    turn = Turn(POLICY, 0.0, {}, 1, frozenset(), 10)
    turn.record_failure("0-0", "it ended")
    assert max_waiting([[state]], spec, turn) == 0
    turn.record_rejection("0-0", "exceeded quota")
    assert max_waiting([[state]], spec, turn) == 1
    turn.record_success("0-0")
    assert turn.history_of("0-0").failures == 1
    assert max_waiting([[state]], spec, turn) == 0


def test_paused_swarm_changes_nothing() -> None:
    cluster = make_large_cluster()
    cluster.edit_spec(paused=True, replicas=3)
    cluster.delete_pod(cluster.ready_pods()[0])
    run_turns(cluster, lambda: None, 10)
    assert len(cluster.pods) == 3
    progressing = cluster.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "Paused")
    assert cluster.condition("Ready")["status"] == "True"
    cluster.edit_spec(paused=False)
    cluster.settle()
    assert len(cluster.ready_pods()) == 6


def test_paused_swarm_reports_its_failing_servers() -> None:
    cluster = make_large_cluster()
    failed = ContainerView(restarts=1, exit_code=1, exit_reason="Error", exit_message="boom")
    cluster.set_pod(cluster.ready_pods()[0], ready=False, container=failed)
    cluster.edit_spec(paused=True)
    cluster.run_turn()
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "Crashing" and "boom" in degraded["message"]


def test_new_server_image_replaces_no_pod() -> None:
    cluster = make_large_cluster()
    cluster.policy = replace(
        POLICY, server_image="registry.example/server:2", image_pull_policy="Always"
    )
    assert cluster.decide().actions == []
    cluster.delete_pod(cluster.ready_pods()[0])
    cluster.settle()
    images = {pod.manifest["spec"]["containers"][0]["image"] for pod in cluster.pods.values()}
    assert images == {"registry.example/server:1", "registry.example/server:2"}


def test_new_pool_moves_no_pod_and_removed_pool_rolls_its_pods() -> None:
    one, two = {"name": "one"}, {"name": "two"}
    cluster = make_large_cluster(2, 2, pools=[one])
    before = set(cluster.pods)
    cluster.edit_spec(pools=[one, two])
    cluster.settle()
    assert set(cluster.pods) == before
    cluster.edit_spec(replicas=3)
    cluster.settle()
    assert [pod.view.annotations[names.POOL] for pod in cluster.server_pods()].count("two") == 2
    cluster.edit_spec(pools=[two])
    cluster.settle()
    assert {pod.view.annotations[names.POOL] for pod in cluster.server_pods()} == {"two"}


def test_replicas_of_a_span_alternate_between_pools() -> None:
    cluster = make_large_cluster(2, 2, pools=[{"name": "one"}, {"name": "two"}])
    for span in "01":
        pools = [
            p.view.annotations[names.POOL]
            for p in cluster.server_pods()
            if p.view.labels[names.SPAN] == span
        ]
        assert sorted(pools) == ["one", "two"]


@pytest.mark.parametrize(
    "change",
    [
        {"sessions": {"holdLimit": "9m"}},
        {"rollout": {"surge": 3, "drainTimeout": "10s"}},
        {"paused": False},
    ],
)
def test_edit_that_no_pod_depends_on_rolls_nothing(change: dict[str, Any]) -> None:
    cluster = make_large_cluster()
    cluster.edit_spec(**change)
    actions = cluster.run_turn().actions
    assert not [action for action in actions if isinstance(action, CreatePod | DeletePod)]


def test_deletion_uses_the_current_drain_timeout() -> None:
    cluster = make_large_cluster(1, 2)
    cluster.edit_spec(replicas=1, rollout={"drainTimeout": "90s"})
    deletes = [action for action in cluster.run_turn().actions if isinstance(action, DeletePod)]
    assert [action.grace_seconds for action in deletes] == [90]


def test_fifty_rapid_edits_end_in_the_last() -> None:
    cluster = make_large_cluster()
    for number in range(50):
        cluster.edit_spec(pools=make_pools(str(number)), replicas=1 + number % 3)
        cluster.run_turn()
        cluster.pass_time(0.1)
    cluster.settle(rounds=200)
    assert {pod.manifest["metadata"]["labels"]["team"] for pod in cluster.server_pods()} == {"49"}
    assert len(cluster.ready_pods()) == 2 * cluster.spec["replicas"]


def assert_coverage(cluster: ModelCluster, servers: int) -> None:
    assert cluster.coverage() >= servers
