"""Tests that would take hours on a cluster, in virtual time: outages, soaks, clock jumps, and edits in a row."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from support.operator.model_cluster import ModelCluster, Node, make_spec
from support.operator.random_faults import RandomFaults

from modelswarm_operator.reconcile.state import names

POOL = {"name": "a", "podTemplate": {"metadata": {"labels": {"team": "x"}}}}
STATES: dict[str, dict[str, Any]] = {
    "default": make_spec(2, 2),
    "three_replicas": make_spec(2, 3),
    "one_replica": make_spec(2, 1),
    "three_spans": make_spec(3, 2),
    "explicit_ranges": {
        **make_spec(),
        "spans": {"ranges": [{"first": 0, "last": 2}, {"first": 2, "last": 8}]},
    },
    "automatic_spans": {**make_spec(), "spans": {}},
    "pod_template": make_spec(2, 2, pools=[POOL]),
    "two_pools": make_spec(
        2, 2, pools=[POOL, {"name": "b", "resources": {"limits": {"cpu": "1"}}}]
    ),
    "short_sessions": make_spec(2, 2, sessions={"maxLength": 512, "concurrent": 4}),
    "other_served_name": make_spec(
        2, 2, model={"source": "demo://counting", "servedName": "other"}
    ),
    "bfloat16": make_spec(2, 2, model={"source": "demo://counting", "dtype": "bfloat16"}),
    "surge_0": make_spec(2, 2, rollout={"surge": 0, "drainTimeout": "10s"}),
    "explicitly_unpaused": make_spec(2, 2, paused=False),
}


def make_large_cluster(spec: dict[str, Any]) -> ModelCluster:
    return ModelCluster(
        spec=copy.deepcopy(spec), nodes={f"n{i}": Node(f"n{i}", capacity=30) for i in range(3)}
    )


def describe_end_state(cluster: ModelCluster) -> Any:
    """Return pods, children and status without incarnations and times."""
    pods = sorted(
        (pod.view.labels[names.SLOT], _anonymize(pod.manifest)) for pod in cluster.server_pods()
    )
    children = {key: child["spec"] for key, child in cluster.children.items()}
    status = {key: cluster.status[key] for key in ("spansText", "coverage", "servedName", "model")}
    return pods, children, status, cluster.status["plan"]["spans"]


def _anonymize(manifest: dict[str, Any]) -> str:
    """Return the manifest as JSON without name, incarnation and pool; the pool depends on earlier pods."""
    pod = copy.deepcopy(manifest)
    container = pod["spec"]["containers"][0]
    number = pod["metadata"]["labels"].pop(names.INCARNATION)
    assert container["args"][container["args"].index("--incarnation") + 1] == number
    container["args"].remove(number)
    for key in (names.TEMPLATE_HASH, names.POOL):
        pod["metadata"]["annotations"].pop(key)
    pod["metadata"]["labels"].pop("team", None)
    container.pop("resources")
    # The drain limit of the swarm when the pod was created; a delete passes the current limit.
    pod["spec"].pop("terminationGracePeriodSeconds")
    del container["args"][container["args"].index("--drain-timeout") + 1]
    return json.dumps(pod, sort_keys=True).replace(pod["metadata"]["name"], "NAME")


@pytest.mark.parametrize("first", STATES)
def test_edited_swarm_ends_as_if_it_were_new(first: str) -> None:
    """Acto's oracle: each state is reached from others, left, and reached again."""
    order = random.Random(first).sample(sorted(STATES), 3)
    cluster = make_large_cluster(STATES[first])
    cluster.settle()
    for name in [*order, first]:
        cluster.spec = copy.deepcopy(STATES[name])
        cluster.edit_spec()
        cluster.settle(rounds=200)
        fresh = make_large_cluster(STATES[name])
        fresh.settle()
        assert describe_end_state(cluster) == describe_end_state(fresh)


def test_half_an_hour_without_operator_is_repaired() -> None:
    cluster = make_large_cluster(make_spec(2, 3))
    cluster.settle()
    for name in cluster.ready_pods()[:2]:
        cluster.force_delete_pod(name)
    cluster.fail_pod(cluster.ready_pods()[0])
    cluster.delete_node("n1")
    cluster.edit_spec(replicas=2)
    cluster.edit_spec(spans={"count": 4})
    for _ in range(18):
        cluster.pass_time(100.0)
    faults = RandomFaults(cluster)
    assert faults.run_until_idle() < 120
    faults.check_end_state()


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_clock_jump_of_an_hour_causes_no_replacement(jump: float) -> None:
    cluster = make_large_cluster(make_spec(2, 2))
    cluster.settle()
    cluster.fail_pod(cluster.ready_pods()[0])
    cluster.run_turn()
    started = cluster.now
    for number in range(40):
        cluster.pass_time()
        cluster.now += jump if number == 5 else -jump if number == 25 else 0.0
        for pod in cluster.pods.values():  # only the operator's clock jumps
            pod.scheduled_at = min(pod.scheduled_at, cluster.now)
        cluster.run_turn()
    assert abs(cluster.now - started - 40.0) < 1.0
    assert len(cluster.ready_pods()) == 4 and cluster.status["incarnation"] == 5


def test_lost_third_of_1000_servers_is_replaced_alone() -> None:
    nodes = {f"n{index}": Node(f"n{index}", capacity=200) for index in range(10)}
    cluster = ModelCluster(spec=make_spec(8, 125), nodes=nodes)
    cluster.settle()
    cluster.pass_time(100.0)
    for name in ("n1", "n4", "n7"):
        cluster.delete_node(name)
    good = set(cluster.ready_pods()) & {
        p.name for p in cluster.server_pods() if p.view.node in cluster.nodes
    }
    lost = 1000 - len(good)
    rounds = cluster.settle()
    assert rounds < 40
    assert good <= set(cluster.pods) and len(cluster.ready_pods()) == 1000
    assert cluster.status["incarnation"] == 1000 + lost


def test_two_hours_of_faults_leave_no_traces() -> None:
    """The status does not grow, and the operator is idle once the faults end."""
    draw = random.Random(2026)
    faults = RandomFaults(ModelCluster())
    started, sizes = faults.cluster.now, []
    while faults.cluster.now < started + 7200.0:
        faults.apply_steps([(draw.randrange(32), draw.randrange(61)) for _ in range(20)])
        sizes.append(len(json.dumps(faults.cluster.status)))
    assert max(sizes[len(sizes) // 2 :]) < 1.5 * max(sizes[: len(sizes) // 2]) + 1000
    faults.end_faults()
    faults.run_until_idle()
    faults.check_end_state()
    assert "slots" not in faults.cluster.status


def test_idle_day_writes_nothing() -> None:
    cluster = make_large_cluster(make_spec(5, 2))
    cluster.settle()
    cluster.pass_time(700.0)
    cluster.run_turn()
    writes = cluster.writes
    for _ in range(24 * 60):
        cluster.now += 60.0
        decision = cluster.run_turn()
        assert not decision.actions and decision.requeue_at is None
    assert cluster.writes == writes
