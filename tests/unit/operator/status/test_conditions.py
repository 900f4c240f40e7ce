"""Conditions: a reason and a message for every kind of problem."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.operator.model_cluster import POLICY, ModelCluster, Node, make_spec

from modelswarm.placement.quantity import bytes_of
from modelswarm.resources.status import Status
from modelswarm_operator.reconcile.overrun import give_up, is_given_up
from modelswarm_operator.reconcile.reconciler import reconcile
from modelswarm_operator.reconcile.state.actions import RecordEvent, WriteStatus
from modelswarm_operator.reconcile.state.observed import ContainerView

KILLED = ContainerView(
    restarts=1, exit_code=137, exit_reason="OOMKilled", waiting="CrashLoopBackOff"
)


def make_settled_cluster(spans: int = 2, replicas: int = 2, **more: Any) -> ModelCluster:
    cluster = ModelCluster(spec=make_spec(spans, replicas, **more))
    cluster.settle()
    cluster.events.clear()
    return cluster


def degrade_first_server(cluster: ModelCluster, **changes: Any) -> dict[str, Any]:
    """Change the first ready pod and return the Degraded condition."""
    cluster.set_pod(cluster.ready_pods()[0], ready=False, **changes)
    cluster.run_turn()
    assert cluster.condition("Degraded")["status"] == "True"
    return cluster.condition("Degraded")


@pytest.mark.parametrize(
    ("container", "reason", "words"),
    [
        (
            ContainerView(waiting="ImagePullBackOff", waiting_message='pull "x:1": 404 Not Found from registry'),
            "ImagePullFailed",
            ["404 Not Found from registry", "imagePullSecrets"],
        ),
        (
            ContainerView(waiting="CreateContainerConfigError", waiting_message='secret "hub" not found'),
            "ConfigurationFailed",
            ['secret "hub" not found'],
        ),
        (
            ContainerView(exit_code=2, exit_reason="Error", exit_message="model: shard 3 is truncated"),
            "WeightsFailed",
            ["blocks 0:4", "model: shard 3 is truncated"],
        ),
        (
            ContainerView(exit_code=3, exit_reason="Error", exit_message="modelswarm-server: it needs 2 GiB"),
            "OutOfMemory",
            ["blocks 0:4", "does not fit into its memory", "it needs 2 GiB"],
        ),
        (
            ContainerView(exit_code=137, exit_reason="OOMKilled", restarts=1),
            "OutOfMemory",
            ["the memory of its node", "resources.limits.memory"],
        ),
        (
            ContainerView(exit_code=1, exit_reason="Error", exit_message="boom", restarts=3,
                          waiting="CrashLoopBackOff"),
            "Crashing",
            ["exit code 1", "3 restarts", "boom"],
        ),
        (
            ContainerView(exit_code=1, exit_reason="Error", restarts=1, exit_message="12:00 serves\n"
                          + '  File "/usr/lib/python3.11/asyncio/runners.py", line 118\n' * 30 + "KeyError: 7\n"),
            "Crashing",
            ["(1 restarts): KeyError: 7"],
        ),
    ],
)  # fmt: skip
def test_failed_container_is_reported_with_its_message(
    container: ContainerView, reason: str, words: list[str]
) -> None:
    degraded = degrade_first_server(make_settled_cluster(), container=container)
    assert degraded["reason"] == reason
    for word in words:
        assert word in degraded["message"]


@pytest.mark.parametrize(
    ("message", "reason", "words"),
    [
        (
            "0/3 nodes are available: 1 node(s) had untolerated taint {x: y}, 2 Insufficient nvidia.com/gpu.",
            "NoCapacity",
            ["Of 3 nodes, 2 have too little nvidia.com/gpu", "untolerated taint"],
        ),
        (
            '0/3 nodes are available: persistentvolumeclaim "weights" not found. not found',
            "VolumeMissing",
            ["volume claim weights", "spec.model.source"],
        ),
    ],
)
def test_unschedulable_pod_reports_the_missing_resource(
    message: str, reason: str, words: list[str]
) -> None:
    cluster = ModelCluster()
    for node in cluster.nodes.values():
        node.capacity = 0
    cluster.run_turn()
    for name in cluster.pods:
        cluster.set_pod(name, unschedulable=message)
    cluster.run_turn()
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == reason
    assert "(3 more like this)" in degraded["message"]
    for word in words:
        assert word in degraded["message"]
    assert cluster.condition("Ready")["reason"] == reason
    assert cluster.decide().actions == []


def test_resource_that_no_node_offers_is_named() -> None:
    cluster = ModelCluster()
    cluster.run_turn()
    for name in cluster.pods:
        cluster.set_pod(
            name, unschedulable="0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
        )
    cluster.run_turn()
    assert "No node offers nvidia.com/gpu at all." in cluster.condition("Degraded")["message"]


def test_pod_not_ready_for_long_is_reported_as_not_starting() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1))
    cluster.run_turn()
    cluster.pass_time()
    name = next(iter(cluster.pods))
    cluster.set_pod(name, container=ContainerView(waiting="ContainerCreating"))
    decision = cluster.decide()
    assert decision.requeue_at is not None
    cluster.now = decision.requeue_at
    cluster.run_turn()
    degraded = cluster.condition("Degraded")
    assert (
        degraded["reason"] == "NotStarting"
        and f"kubectl describe pod {name}" in degraded["message"]
    )


def test_server_that_is_unready_for_a_moment_is_no_problem() -> None:
    cluster = make_settled_cluster()
    cluster.pass_time(POLICY.slow_start)
    cluster.set_pod(cluster.ready_pods()[0], ready=False, unready_since=cluster.now)
    cluster.run_turn()
    assert cluster.condition("Degraded")["status"] == "False"
    cluster.now += POLICY.slow_start
    cluster.run_turn()
    assert cluster.condition("Degraded")["reason"] == "NotStarting"


def test_uncovered_span_is_named_with_its_cause() -> None:
    cluster = make_settled_cluster(2, 1)
    container = ContainerView(
        exit_code=2, exit_reason="Error", exit_message="no such file", restarts=1
    )
    name = cluster.ready_pods(1)[0]
    cluster.set_pod(name, ready=False, container=container)
    cluster.run_turn()
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "SpanUncovered")
    assert "4:8" in ready["message"] and "no such file" in ready["message"]
    assert cluster.condition("Degraded")["reason"] == "WeightsFailed"


def test_starting_swarm_is_not_degraded() -> None:
    cluster = ModelCluster()
    cluster.run_turn()
    assert cluster.condition("Ready")["reason"] == "Starting"
    assert cluster.condition("Progressing")["status"] == "True"
    assert cluster.condition("Degraded")["status"] == "False"


def test_span_count_above_the_model_keeps_running_pods() -> None:
    cluster = make_settled_cluster()
    pods = set(cluster.pods)
    cluster.edit_spec(spans={"count": 9})
    cluster.settle()
    assert set(cluster.pods) == pods
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "InvalidSpec"
    assert "spec.spans.count: 9 is not allowed for a model of 8 blocks" in degraded["message"]
    assert cluster.condition("Ready")["status"] == "True"
    progressing = cluster.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "Held")
    cluster.edit_spec(spans={"count": 2})
    cluster.settle()
    assert set(cluster.pods) == pods and cluster.condition("Degraded")["status"] == "False"


def test_swarm_with_an_invalid_spec_can_be_suspended() -> None:
    cluster = make_settled_cluster()
    cluster.edit_spec(spans={"count": 9}, replicas=0)
    cluster.run_turn()
    assert cluster.condition("Progressing")["reason"] == "Shrinking"
    cluster.settle()
    assert not cluster.pods
    assert cluster.condition("Degraded")["reason"] == "InvalidSpec"
    assert cluster.condition("Progressing")["reason"] == "Held"


def test_too_small_pools_are_an_invalid_spec() -> None:
    cluster = ModelCluster(
        spec=make_spec(2, 1, pools=[{"name": "tiny", "resources": {"limits": {"memory": "1Mi"}}}])
    )
    cluster.run_turn()
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "InvalidSpec" and "needs" in degraded["message"]
    assert not cluster.pods


def test_unreadable_spec_only_updates_the_status() -> None:
    cluster = make_settled_cluster()
    seen = cluster.observe()
    unread = replace(seen.swarm, spec=None, spec_problem="spec.model.source: 'x' is not allowed")
    decision = reconcile(replace(seen, swarm=unread), cluster.policy, cluster.now)
    writes = [action.status for action in decision.actions if isinstance(action, WriteStatus)]
    assert [type(a) for a in decision.actions if not isinstance(a, WriteStatus | RecordEvent)] == []
    assert "spec.model.source: 'x' is not allowed" in json.dumps(writes[0]["conditions"])
    assert writes[0]["coverageText"] == "2/2"


def test_taken_name_of_an_adapter_names_its_field() -> None:
    adapters = [{"name": "counting", "source": "hf://org/law"}]
    spec = make_spec(model={"source": "demo://counting", "adapters": adapters})
    cluster = ModelCluster(spec=spec, name_taken_by="other/first")
    cluster.run_turn()
    assert "another name in spec.model.adapters" in cluster.condition("Degraded")["message"]


def test_taken_served_name_starts_no_pod() -> None:
    cluster = ModelCluster(name_taken_by="other/first")
    cluster.run_turn()
    assert not cluster.pods
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "ServedNameTaken" and "other/first" in degraded["message"]
    assert cluster.status["servedName"] == "", "the swarm does not own the name"
    cluster.name_taken_by = ""
    cluster.settle()
    assert len(cluster.ready_pods()) == 4
    assert cluster.status["servedName"] == "counting"


def test_reserved_template_fields_are_named_and_ignored() -> None:
    template = {
        "metadata": {"labels": {"modelswarm.io/span": "9", "team": "x"}},
        "spec": {"restartPolicy": "Never"},
    }
    cluster = make_settled_cluster(1, 1, pools=[{"name": "a", "podTemplate": template}])
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "PodTemplateReserved"
    assert "spec.pools[0].podTemplate: metadata.labels[modelswarm.io/span]" in degraded["message"]
    assert "spec.restartPolicy" in degraded["message"]
    pod = next(iter(cluster.pods.values())).manifest
    assert pod["metadata"]["labels"]["team"] == "x"
    assert pod["spec"]["restartPolicy"] == "Always"


def test_invalid_pod_template_patch_is_an_invalid_spec() -> None:
    template = {"spec": {"containers": [{"image": "x"}]}}
    cluster = ModelCluster(spec=make_spec(1, 1, pools=[{"name": "a", "podTemplate": template}]))
    cluster.run_turn()
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "InvalidSpec"
    assert "spec.pools[0].podTemplate.spec.containers[0]: needs a name" in degraded["message"]


def test_transition_time_changes_only_with_the_status() -> None:
    cluster = make_settled_cluster()
    since = cluster.condition("Ready")["lastTransitionTime"]
    cluster.now += 100.0
    cluster.edit_spec(replicas=3)
    cluster.run_turn()
    assert cluster.condition("Ready")["lastTransitionTime"] == since
    assert cluster.condition("Ready")["observedGeneration"] == cluster.generation
    assert cluster.status["observedGeneration"] == cluster.generation
    progressing = cluster.condition("Progressing")
    assert progressing["status"] == "True" and progressing["lastTransitionTime"] != since


def test_status_has_the_address_of_the_gateways() -> None:
    url = "http://gateway.ms:8000/v1"
    cluster = ModelCluster(spec=make_spec(), policy=replace(POLICY, gateway_url=url))
    cluster.settle()
    assert cluster.status["url"] == url


def test_long_message_of_a_container_is_cut() -> None:
    cluster = make_settled_cluster()
    waiting = ContainerView(waiting="ImagePullBackOff", waiting_message="x" * 2000)
    message = degrade_first_server(cluster, container=waiting)["message"]
    assert "x" * 499 + "…" in message and "x" * 500 not in message


def test_written_status_is_in_the_schema() -> None:
    """A field that the API server prunes would be written in every turn."""
    cluster = make_settled_cluster()
    cluster.fail_pod(cluster.ready_pods()[0])
    cluster.annotate(**{"reconcile-at": "x"})
    cluster.policy = replace(cluster.policy, gateway_url="http://gateway:8000/v1")
    cluster.run_turn()
    assert Status.from_stored(cluster.status).to_json() == cluster.status
    assert set(cluster.status) <= {field.alias for field in Status.model_fields.values()}


@pytest.mark.full
def test_status_of_1000_servers_is_small_and_idle_turn_is_fast() -> None:
    nodes = {f"n{index}": Node(f"n{index}", capacity=300) for index in range(8)}
    cluster = ModelCluster(spec=make_spec(8, 125), nodes=nodes)
    cluster.settle()
    for name in cluster.ready_pods():
        cluster.set_pod(
            name,
            ready=False,
            container=ContainerView(exit_code=1, exit_message="x" * 4096, restarts=1),
        )
    cluster.run_turn()
    for name in list(cluster.pods):
        cluster.fail_pod(name, message="y" * 4096)
    cluster.run_turn()
    assert len(json.dumps(cluster.status)) < 300_000
    for seconds, spans, replicas in ((0.1, 8, 125), (0.002, 5, 2)):
        cluster = ModelCluster(spec=make_spec(spans, replicas), nodes=nodes)
        cluster.settle()
        seen = cluster.observe()
        assert _measure_least_cpu_seconds(cluster, seen) < seconds


def _measure_least_cpu_seconds(cluster: ModelCluster, seen: Any) -> float:
    took = []
    for _ in range(7):
        started = time.process_time()
        cluster.decide(seen)
        took.append(time.process_time() - started)
    return min(took)


def test_status_lists_spans_and_their_servers() -> None:
    cluster = make_settled_cluster()
    assert cluster.status["coverageText"] == "2/2"
    assert cluster.status["spansText"] == "0:4=2/2 4:8=2/2"
    assert cluster.status["spans"][1]["servers"] == cluster.ready_pods(1)
    assert cluster.status["replicas"] == 2
    assert cluster.status["selector"].endswith(",modelswarm.io/role=server,modelswarm.io/span=0")
    assert cluster.status["servedName"] == "counting"


def test_documented_numbers_equal_the_policy() -> None:
    folder = Path(__file__).parents[4]
    page = (folder / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    policy = ModelCluster().policy
    for sentence in (
        f"after {policy.not_ready_grace:.0f} s its slots",
        f"{policy.mass_outage_count} or more, and more than half",
        f"nothing is replaced for {policy.mass_outage_timeout / 60:.0f} minutes",
        f"wait {policy.backoff_base:.0f}, 4, 8 … {policy.backoff_limit:.0f} s",
        f"run for {policy.stable_after / 60:.0f} minutes",
        f"after {policy.max_restarts} restarts",
        f"(at least {policy.min_budget})",
        f"stays for {policy.unready_grace:.0f} s",
    ):
        assert sentence in page, sentence
    assert (policy.mass_outage_fraction, policy.budget_per_slot, policy.stuck_after) == (
        0.5,
        3,
        60.0,
    )


def make_limited_cluster(limit: str | None = "2Gi", **sessions: Any) -> ModelCluster:
    limits = {} if limit is None else {"memory": limit}
    pools = [{"name": "small", "resources": {"limits": limits}}]
    return ModelCluster(spec=make_spec(1, 1, pools=pools, sessions=sessions))


def kill_first_server(cluster: ModelCluster) -> dict[str, Any]:
    """Kill a settled cluster's server for its memory and return the Degraded condition."""
    cluster.settle()
    cluster.set_pod(cluster.ready_pods()[0], ready=False, container=KILLED)
    cluster.run_turn()
    degraded: dict[str, Any] = cluster.condition("Degraded")
    assert degraded["reason"] == "OutOfMemory"
    return degraded


@pytest.mark.parametrize(
    ("concurrent", "cure"),
    [(8, ", or lower spec.sessions.concurrent from 8 to 6."), (1, ".")],
)
def test_killed_server_condition_names_field_and_value(concurrent: int, cure: str) -> None:
    message = kill_first_server(make_limited_cluster(concurrent=concurrent))["message"]
    raised = (
        "its memory limit of 2Gi. Raise resources.limits.memory of pool small from 2Gi to 2560Mi"
    )
    assert raised + cure in message


def test_killed_server_that_fills_its_limit_gets_fewer_sessions() -> None:
    message = kill_first_server(make_limited_cluster())["message"]
    found = re.search(
        r"a higher limit alone does not help: set spec\.sessions\.concurrent to (\d+) \(it has room for (\d+)\), "
        r"or to (\d+) and raise resources\.limits\.memory of pool small from 2Gi to 2560Mi\.",
        message,
    )
    assert found is not None, message
    assert 0 < int(found[1]) < int(found[2]) == int(found[3])


def test_killed_server_with_room_for_one_gets_a_limit() -> None:
    message = kill_first_server(make_limited_cluster("920Mi"))["message"]
    assert "set spec.sessions.concurrent to 1 and raise resources.limits.memory" in message
    assert "from 920Mi to 1152Mi, or lower spec.sessions.maxLength from 4096" in message


def test_killed_server_without_limit_is_told_to_set_one() -> None:
    message = kill_first_server(make_limited_cluster(None, concurrent=4))["message"]
    assert "the memory of its node. Set resources.limits.memory of pool small" in message
    assert "or lower spec.sessions.concurrent from 4 to 3." in message


def test_status_shows_the_parts_of_the_planned_memory() -> None:
    cluster = make_limited_cluster()
    cluster.settle()
    (span,) = cluster.status["plan"]["spans"]
    memory = {name: bytes_of(size, name) for name, size in span["memory"].items()}

    assert span["memory"]["process"] == "768Mi"
    variable = ["weights", "activations", "grammars", "retainedRows"]
    assert list(memory) == ["process", *variable, "margin", "kv", "total"]
    total = memory.pop("total")
    assert total <= 2 << 30
    assert total <= sum(memory.values()) <= total + (6 << 20)  # each part is rounded up


def test_given_up_swarm_waits_for_another_spec() -> None:
    cluster = make_settled_cluster()
    cluster.annotate(**{"reconcile-at": "monday"})
    before, swarm = cluster.status, cluster.observe().swarm
    assert not is_given_up(swarm)
    for action in give_up(swarm, 10.0, cluster.now).actions:
        cluster.execute_action(action, cluster.observe())

    degraded = cluster.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "DecisionTooLong")
    assert "after 10 s of CPU time" in degraded["message"]
    assert [event.reason for event in cluster.events] == ["DecisionTooLong"]
    for name in ("plan", "model", "incarnation", "spans", "coverage"):
        assert cluster.status[name] == before[name]
    assert cluster.condition("Ready")["status"] == "True", "its servers still run"
    assert is_given_up(cluster.observe().swarm)

    cluster.annotate(**{"reconcile-at": "tuesday"})
    assert not is_given_up(cluster.observe().swarm)
    cluster.annotations.clear()  # one more attempt; its report ends the attempts again
    cluster.version += 1
    assert not is_given_up(cluster.observe().swarm)
    for action in give_up(cluster.observe().swarm, 10.0, cluster.now).actions:
        cluster.execute_action(action, cluster.observe())
    assert is_given_up(cluster.observe().swarm)
    cluster.edit_spec(replicas=1)
    assert not is_given_up(cluster.observe().swarm)
    cluster.run_turn()
    assert cluster.condition("Degraded")["reason"] == "AsExpected"


def test_given_up_swarm_can_be_deleted() -> None:
    cluster = make_settled_cluster()
    swarm = cluster.observe().swarm
    for action in give_up(swarm, 10.0, cluster.now).actions:
        cluster.execute_action(action, cluster.observe())
    cluster.delete_swarm()
    assert not is_given_up(cluster.observe().swarm)


def test_limit_below_the_process_is_an_invalid_spec() -> None:
    cluster = make_limited_cluster("700Mi")
    cluster.run_turn()
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "InvalidSpec" and not cluster.pods
    assert "but has 700 MiB; allowed: at least" in degraded["message"]
