"""Every slot gets and keeps a pod through any failures; repeated failures are retried with backoff."""

from __future__ import annotations

import pytest
from support.operator.model_cluster import POLICY, ModelCluster, make_spec

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import CreatePod, DeletePod, LabelPod, WriteStatus
from modelswarm_operator.reconcile.state.observed import NAME_TAKEN, ContainerView


def create_and_list_slots(cluster: ModelCluster) -> list[str]:
    """Run a turn; return the slots of the created pods."""
    return [action.slot for action in cluster.run_turn().actions if isinstance(action, CreatePod)]


def wait_for_create(cluster: ModelCluster) -> float:
    """Run turns when the operator asks for one; return the seconds until it creates a pod."""
    started = cluster.now
    while not create_and_list_slots(cluster):
        assert cluster.wake_at is not None and cluster.wake_at > cluster.now
        cluster.now = cluster.wake_at
    return cluster.now - started


def test_new_swarm_fills_every_slot_and_then_idles() -> None:
    cluster = ModelCluster()
    cluster.settle()
    assert len(cluster.ready_pods()) == 4
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.decide().actions == []


def test_incarnations_are_stored_before_pods_are_created() -> None:
    kinds = [type(action) for action in ModelCluster().decide().actions]
    assert kinds[0] is WriteStatus
    assert CreatePod in kinds


def test_deleted_pod_is_replaced_with_a_higher_incarnation() -> None:
    cluster = ModelCluster()
    cluster.settle()
    cluster.delete_pod(cluster.ready_pods(0)[0])
    assert create_and_list_slots(cluster) == ["0-0"]
    assert max(map(names.incarnation_of_name, cluster.pods)) == 5
    cluster.settle()
    assert len(cluster.pods) == 4


def test_force_deleted_pod_is_replaced() -> None:
    cluster = ModelCluster()
    cluster.settle()
    cluster.force_delete_pod(cluster.ready_pods(1)[0])
    cluster.settle()
    assert len(cluster.ready_pods()) == 4
    assert cluster.status["incarnation"] == 5


def test_evicted_pod_is_deleted_and_replaced_in_the_same_turn() -> None:
    cluster = ModelCluster()
    cluster.settle()
    victim = cluster.ready_pods(0)[1]
    cluster.fail_pod(victim, "Evicted", "The node was low on resource: memory")
    actions = cluster.run_turn().actions
    assert [a.name for a in actions if isinstance(a, DeletePod)] == [victim]
    assert [a.slot for a in actions if isinstance(a, CreatePod)] == ["0-1"]
    event = next(each for each in cluster.events if each.reason == "ServerFailed")
    assert "Evicted" in event.message and "low on resource" in event.message


def test_slot_backoff_doubles_with_each_failure() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.settle()
    waits = []
    for _ in range(5):
        cluster.fail_pod(next(iter(cluster.pods)))
        waits.append(wait_for_create(cluster))
    assert waits == [0.0, 2.0, 4.0, 8.0, 16.0]


def test_slot_failures_reset_after_a_stable_run() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.settle()
    cluster.fail_pod(next(iter(cluster.pods)))
    cluster.settle()
    assert cluster.status["slots"][0]["failures"] == 1
    assert cluster.wake_at is not None
    cluster.now = cluster.wake_at
    cluster.run_turn()
    assert "slots" not in cluster.status
    assert cluster.decide().requeue_at is None


def test_crashing_container_is_deleted_after_max_restarts() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.is_crashing = lambda pod: True
    cluster.run_turn()
    first = next(iter(cluster.pods))
    while (view := cluster.pods[first].view).deleting_since is None:
        assert view.container.restarts < POLICY.max_restarts
        cluster.pass_time()
        cluster.run_turn()
    assert cluster.status["slots"][0]["failures"] == 1


@pytest.mark.parametrize(("ran", "is_replaced"), [(60.0, True), (30 * 86400.0, False)])
def test_restarts_of_months_replace_no_pod(ran: float, is_replaced: bool) -> None:
    """The kubelet restarts a container that ran for long at once, and its node has the weights."""
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.settle()
    [name] = cluster.pods
    ended = ContainerView(restarts=POLICY.max_restarts, exit_code=137, ran=ran)
    cluster.set_pod(name, ready=False, container=ended)
    deleted = [each.name for each in cluster.decide().actions if isinstance(each, DeletePod)]
    assert deleted == ([name] if is_replaced else [])


def test_broken_image_creates_few_pods() -> None:
    cluster = ModelCluster(spec=make_spec(2, 3))
    cluster.is_crashing = lambda pod: True
    for _ in range(400):
        cluster.pass_time(10.0)
        cluster.run_turn()
    assert len(cluster.used_incarnations) < 6 * 20  # one hour, six slots
    degraded = cluster.condition("Degraded")
    assert degraded["status"] == "True"
    assert degraded["reason"] == "RestartBudgetUsedUp"
    assert "replaced quickly" in degraded["message"]


def test_exhausted_budget_makes_failures_wait_the_longest() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.settle()
    for _ in range(POLICY.min_budget):
        cluster.fail_pod(next(iter(cluster.pods)))
        wait_for_create(cluster)
    cluster.fail_pod(next(iter(cluster.pods)))
    assert wait_for_create(cluster) == POLICY.backoff_limit
    assert "waits 300 s" in cluster.condition("Degraded")["message"]


def test_reconcile_annotation_ends_the_backoff() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.settle()
    for _ in range(4):
        cluster.fail_pod(next(iter(cluster.pods)))
        wait_for_create(cluster)
    cluster.fail_pod(next(iter(cluster.pods)))
    assert create_and_list_slots(cluster) == []
    cluster.annotate(**{"reconcile-at": "now"})
    assert create_and_list_slots(cluster) == ["0-0"]
    assert cluster.status["reconciledAt"] == "now"
    cluster.settle()


def test_failing_slot_leaves_other_slots_alone() -> None:
    cluster = ModelCluster()
    cluster.settle()
    good = set(cluster.ready_pods()[1:])
    cluster.is_crashing = lambda pod: pod.name not in good
    cluster.delete_pod(cluster.ready_pods()[0])
    for _ in range(100):
        cluster.pass_time(3.0)
        cluster.run_turn()
    assert good <= set(cluster.ready_pods())
    assert not any(f"delete {name}" in line for name in good for line in cluster.log)


def test_unschedulable_pod_is_kept() -> None:
    cluster = ModelCluster()
    for node in cluster.nodes.values():
        node.capacity = 0
    for _ in range(120):
        cluster.run_turn()
        cluster.pass_time()
    assert cluster.status["incarnation"] == 4
    assert cluster.condition("Degraded")["reason"] == "NoCapacity"
    assert cluster.decide().actions == []


def test_refused_create_is_retried_with_backoff_under_its_name() -> None:
    cluster = ModelCluster(spec=make_spec(1, 2), quota=1)
    attempts = 0
    for _ in range(300):
        attempts += "0-1" in create_and_list_slots(cluster)
        cluster.pass_time()
    assert attempts <= 11
    assert cluster.status["incarnation"] == 2
    assert cluster.condition("Degraded")["reason"] == "CreateRefused"
    assert "exceeded quota: pods=1" in cluster.condition("Degraded")["message"]
    assert cluster.condition("Ready")["status"] == "True"
    cluster.quota = None
    wait_for_create(cluster)
    cluster.settle()
    assert len(cluster.ready_pods()) == 2
    assert cluster.condition("Degraded")["status"] == "False"


def test_next_leader_still_reports_refused_creates() -> None:
    """It knows them from the status only, and its first attempt may be minutes away."""
    cluster = ModelCluster(spec=make_spec(1, 2), quota=1)
    for _ in range(30):
        cluster.run_turn()
        cluster.pass_time(10.0)
    before = cluster.condition("Degraded")
    assert before["reason"] == "CreateRefused"
    cluster.rejected.clear()
    cluster.run_turn()
    assert cluster.condition("Degraded") == before


def test_incarnation_whose_name_is_taken_is_skipped() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.run_turn()
    cluster.pods.clear()  # the create failed: the name belongs to another owner's pod
    cluster.rejected["0-0"] = f"a pod counting-s0-1 {NAME_TAKEN}"
    (create,) = [a for a in cluster.decide().actions if isinstance(a, CreatePod)]
    assert create.manifest["metadata"]["labels"]["modelswarm.io/incarnation"] == "2"
    cluster.rejected.clear()
    cluster.settle()
    assert len(cluster.ready_pods()) == 1
    assert not cluster.status.get("slots")


def test_refused_creates_do_not_use_the_failure_budget() -> None:
    cluster = ModelCluster(spec=make_spec(2, 3), quota=1)
    for _ in range(60):
        cluster.run_turn()
        cluster.pass_time(10.0)
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "CreateRefused"
    assert "replaced quickly" not in degraded["message"]  # the message of a spent budget


def test_first_failure_after_refused_creates_is_replaced_at_once() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1), quota=0)
    for _ in range(60):
        cluster.run_turn()
        cluster.pass_time(60.0)
    cluster.quota = None
    for _ in range(10):
        cluster.run_turn()
        cluster.pass_time(60.0)
    cluster.fail_pod(cluster.ready_pods()[0])
    cluster.settle()
    assert len(cluster.ready_pods()) == 1
    assert cluster.status["slots"][0]["failures"] == 1
    assert cluster.condition("Degraded")["reason"] == "AsExpected"


def test_refused_creates_between_failures_reset_no_pause() -> None:
    """A pod that fails in a namespace whose quota is used up must not be replaced at once for ever."""
    cluster = ModelCluster(spec=make_spec(1, 1))
    for _ in range(4):
        cluster.settle(rounds=1000)
        cluster.fail_pod(cluster.ready_pods()[0])
        cluster.quota = 0
        cluster.run_turn()
        cluster.pass_time(30.0)
        cluster.run_turn()
        cluster.quota = None
    assert cluster.status["slots"][0]["failures"] == 4


def test_preempted_pod_counts_as_a_failure() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.settle()
    name = cluster.ready_pods()[0]
    cluster.set_pod(name, disruption="PreemptionByScheduler")
    cluster.delete_pod(name)
    cluster.run_turn()
    assert cluster.status["slots"][0]["failures"] == 1
    assert "preempted" in cluster.status["slots"][0]["lastFailure"]


def test_failed_container_of_a_deleted_pod_is_not_counted() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.settle()
    name = cluster.ready_pods()[0]
    cluster.delete_pod(name)
    cluster.fail_pod(name, reason="", message="")
    cluster.run_turn()
    assert "failures" not in cluster.status["slots"][0]


def test_eviction_is_not_counted_as_a_failure() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.settle()
    name = cluster.ready_pods()[0]
    cluster.set_pod(name, disruption="EvictionByEvictionAPI")
    cluster.delete_pod(name)
    cluster.run_turn()
    assert "failures" not in cluster.status["slots"][0]


def test_flapping_readiness_replaces_no_pod() -> None:
    cluster = ModelCluster()
    cluster.settle()
    name = cluster.ready_pods()[0]
    for number in range(60):
        cluster.set_pod(name, ready=number % 2 == 0)
        cluster.run_turn()
        cluster.now += 1.0
    assert cluster.status["incarnation"] == 4
    assert name in cluster.pods


def test_kept_pod_leaves_service_and_its_slot_is_filled() -> None:
    cluster = ModelCluster()
    cluster.settle()
    name = cluster.ready_pods(0)[0]
    annotations = {**cluster.pods[name].view.annotations, names.KEEP: "true"}
    cluster.set_pod(name, annotations=annotations)
    actions = cluster.run_turn().actions
    assert [a for a in actions if isinstance(a, LabelPod)] == [
        LabelPod(name, cluster.pods[name].view.uid, {names.ROLE: names.KEPT})
    ]
    cluster.settle()
    assert name in cluster.pods and len(cluster.ready_pods(0)) == 2
    assert cluster.decide().actions == []
    del annotations[names.KEEP]
    cluster.set_pod(name, annotations=annotations)
    cluster.settle()
    assert name not in cluster.pods


@pytest.mark.parametrize(
    ("label", "value"),
    [
        (names.SLOT, "17"),
        (names.SPAN, "17"),
        (names.INCARNATION, "17"),
        (names.ROLE, names.INSPECT),
    ],
)
def test_edited_label_is_restored(label: str, value: str) -> None:
    cluster = ModelCluster()
    cluster.settle()
    name = cluster.ready_pods(0)[0]
    right = dict(cluster.pods[name].view.labels)
    cluster.set_pod(name, labels={**right, label: value})
    cluster.settle()
    assert cluster.pods[name].view.labels == right
    assert cluster.status["incarnation"] == 4


def test_pod_without_a_valid_slot_is_deleted() -> None:
    cluster = ModelCluster()
    cluster.settle()
    name = cluster.ready_pods(0)[0]
    annotations = {k: v for k, v in cluster.pods[name].view.annotations.items() if k != names.SLOT}
    cluster.set_pod(
        name, labels={**cluster.pods[name].view.labels, names.SLOT: "?"}, annotations=annotations
    )
    cluster.settle()
    assert name not in cluster.pods and len(cluster.ready_pods()) == 4


def test_lost_status_keeps_pods_and_reuses_no_incarnation() -> None:
    cluster = ModelCluster()
    cluster.settle()
    cluster.status = {}
    cluster.version += 1
    before = set(cluster.pods)
    cluster.settle()
    assert set(cluster.pods) == before
    assert cluster.status["incarnation"] == 4
    cluster.delete_pod(cluster.ready_pods()[0])
    cluster.settle()
    assert cluster.status["incarnation"] == 5


def test_clock_set_back_extends_no_backoff_beyond_the_limit() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.settle()
    for _ in range(4):
        cluster.fail_pod(next(iter(cluster.pods)))
        wait_for_create(cluster)
    cluster.fail_pod(next(iter(cluster.pods)))
    cluster.run_turn()
    cluster.now -= 3600.0
    assert wait_for_create(cluster) <= POLICY.backoff_limit
