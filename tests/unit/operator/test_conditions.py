"""What a person reads: reasons and sentences for every kind of trouble, written once, with Events on transitions."""

from __future__ import annotations

import inspect
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.operator.model_cluster import Node, World, document

from modelswarm.resources.status import Status
from modelswarm_operator.reconcile.reconciler import reconcile
from modelswarm_operator.reconcile.state.actions import RecordEvent, WriteStatus
from modelswarm_operator.reconcile.state.observed import ContainerView
from modelswarm_operator.reconcile.status.condition_rules import condition_updates
from modelswarm_operator.reconcile.status.problems import PRIORITY


def settled(spans: int = 2, replicas: int = 2, **more: Any) -> World:
    world = World(spec=document(spans, replicas, **more))
    world.settle()
    world.told.clear()
    return world


def degraded_by(world: World, **changes: Any) -> dict[str, Any]:
    """Degraded after the first ready server was changed like this."""
    world.set_pod(world.ready()[0], ready=False, **changes)
    world.turn()
    assert world.condition("Degraded")["status"] == "True"
    return world.condition("Degraded")


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
    told = degraded_by(settled(), container=container)
    assert told["reason"] == reason
    for word in words:
        assert word in told["message"]


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
    world = World()
    for node in world.nodes.values():
        node.room = 0
    world.turn()
    for name in world.pods:
        world.set_pod(name, unschedulable=message)
    world.turn()
    told = world.condition("Degraded")
    assert told["reason"] == reason
    assert "(3 more like this)" in told["message"]
    for word in words:
        assert word in told["message"]
    assert world.condition("Ready")["reason"] == reason
    assert world.decide().actions == []


def test_resource_that_no_node_offers_is_named() -> None:
    world = World()
    world.turn()
    for name in world.pods:
        world.set_pod(name, unschedulable="0/4 nodes are available: 4 Insufficient nvidia.com/gpu.")
    world.turn()
    assert "No node offers nvidia.com/gpu at all." in world.condition("Degraded")["message"]


def test_pod_not_ready_for_long_is_reported_as_not_starting() -> None:
    world = World(spec=document(1, 1))
    world.turn()
    world.pass_time()
    name = next(iter(world.pods))
    world.set_pod(name, container=ContainerView(waiting="ContainerCreating"))
    decision = world.decide()
    assert decision.requeue_at is not None
    world.now = decision.requeue_at
    world.turn()
    told = world.condition("Degraded")
    assert told["reason"] == "NotStarting" and f"kubectl describe pod {name}" in told["message"]


def test_uncovered_span_is_named_with_its_cause() -> None:
    world = settled(2, 1)
    container = ContainerView(
        exit_code=2, exit_reason="Error", exit_message="no such file", restarts=1
    )
    name = world.ready(1)[0]
    world.set_pod(name, ready=False, container=container)
    world.turn()
    ready = world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "SpanUncovered")
    assert "4:8" in ready["message"] and "no such file" in ready["message"]
    assert world.condition("Degraded")["reason"] == "WeightsFailed"


def test_starting_swarm_is_not_degraded() -> None:
    world = World()
    world.turn()
    assert world.condition("Ready")["reason"] == "Starting"
    assert world.condition("Progressing")["status"] == "True"
    assert world.condition("Degraded")["status"] == "False"


def test_span_count_above_the_model_keeps_running_pods() -> None:
    world = settled()
    pods = set(world.pods)
    world.edit(spans={"count": 9})
    world.settle()
    assert set(world.pods) == pods
    told = world.condition("Degraded")
    assert told["reason"] == "InvalidSpec"
    assert "spec.spans.count: 9 is not allowed for a model of 8 blocks" in told["message"]
    assert world.condition("Ready")["status"] == "True"
    assert world.condition("Progressing")["reason"] == "Held"
    world.edit(spans={"count": 2})
    world.settle()
    assert set(world.pods) == pods and world.condition("Degraded")["status"] == "False"


def test_too_small_pools_are_an_invalid_spec() -> None:
    world = World(
        spec=document(2, 1, pools=[{"name": "tiny", "resources": {"limits": {"memory": "1Mi"}}}])
    )
    world.turn()
    told = world.condition("Degraded")
    assert told["reason"] == "InvalidSpec" and "needs" in told["message"]
    assert not world.pods


def test_unreadable_spec_only_updates_the_status() -> None:
    world = settled()
    seen = world.observe()
    unread = replace(seen.swarm, spec=None, spec_problem="spec.model.source: 'x' is not allowed")
    decision = reconcile(replace(seen, swarm=unread), world.policy, world.now)
    writes = [action.status for action in decision.actions if isinstance(action, WriteStatus)]
    assert [type(a) for a in decision.actions if not isinstance(a, WriteStatus | RecordEvent)] == []
    assert "spec.model.source: 'x' is not allowed" in json.dumps(writes[0]["conditions"])
    assert writes[0]["coverageText"] == "2/2"


def test_taken_served_name_starts_no_pod() -> None:
    world = World(taken_by="other/first")
    world.turn()
    assert not world.pods
    told = world.condition("Degraded")
    assert told["reason"] == "ServedNameTaken" and "other/first" in told["message"]
    assert world.status["servedName"] == "", "it does not have the name"
    world.taken_by = ""
    world.settle()
    assert len(world.ready()) == 4
    assert world.status["servedName"] == "counting"


def test_reserved_template_fields_are_named_and_ignored() -> None:
    template = {
        "metadata": {"labels": {"modelswarm.io/span": "9", "team": "x"}},
        "spec": {"restartPolicy": "Never"},
    }
    world = settled(1, 1, pools=[{"name": "a", "podTemplate": template}])
    told = world.condition("Degraded")
    assert told["reason"] == "PodTemplateReserved"
    assert "spec.pools[0].podTemplate: metadata.labels[modelswarm.io/span]" in told["message"]
    assert "spec.restartPolicy" in told["message"]
    pod = next(iter(world.pods.values())).manifest
    assert pod["metadata"]["labels"]["team"] == "x"
    assert pod["spec"]["restartPolicy"] == "Always"


def test_invalid_pod_template_patch_is_an_invalid_spec() -> None:
    template = {"spec": {"containers": [{"image": "x"}]}}
    world = World(spec=document(1, 1, pools=[{"name": "a", "podTemplate": template}]))
    world.turn()
    told = world.condition("Degraded")
    assert told["reason"] == "InvalidSpec"
    assert "spec.pools[0].podTemplate.spec.containers[0]: needs a name" in told["message"]


def test_transition_time_changes_only_with_the_status() -> None:
    world = settled()
    since = world.condition("Ready")["lastTransitionTime"]
    world.now += 100.0
    world.edit(replicas=3)
    world.turn()
    assert world.condition("Ready")["lastTransitionTime"] == since
    assert world.condition("Ready")["observedGeneration"] == world.generation
    assert world.status["observedGeneration"] == world.generation
    progressing = world.condition("Progressing")
    assert progressing["status"] == "True" and progressing["lastTransitionTime"] != since


def test_event_is_recorded_once_per_transition() -> None:
    world = settled()
    world.kill(world.ready()[0])
    for _ in range(10):
        world.turn()
        world.pass_time()
    reasons = [tell.reason for tell in world.told]
    assert reasons.count("Replacing") == 1
    assert len(reasons) <= 3


def test_events_follow_the_transitions_of_a_swarm() -> None:
    world = World(spec=document(2, 1))
    world.settle()
    assert [tell.reason for tell in world.told] == ["Planned", "Filling", "Ready"] or [
        tell.reason for tell in world.told
    ] == ["Filling", "Planned", "Ready"]
    world.told.clear()
    container = ContainerView(
        exit_code=2, exit_reason="Error", exit_message="truncated", restarts=1
    )
    name = world.ready()[0]
    world.set_pod(name, ready=False, container=container)
    world.turn()
    assert {(tell.kind, tell.reason) for tell in world.told} == {
        ("Warning", "NotReady"),
        ("Warning", "WeightsFailed"),
        ("Normal", "Filling"),
    }
    world.told.clear()
    world.settle()
    assert {tell.reason for tell in world.told} == {"Ready", "Recovered"}


def test_mass_failure_records_few_events() -> None:
    nodes = {f"n{index}": Node(f"n{index}", room=100) for index in range(9)}
    world = World(spec=document(4, 20), nodes=nodes)
    world.settle()
    world.told.clear()
    for name in world.ready()[:40]:
        world.fail(name)
    world.turn()
    assert len(world.told) < 15
    assert any("more at the same time" in tell.message for tell in world.told)


def test_every_condition_reason_is_documented() -> None:
    folder = Path(__file__).parents[3]
    page = (folder / "docs" / "modelswarm-resource.md").read_text(encoding="utf-8")
    rules = Path(inspect.getfile(condition_updates)).read_text(encoding="utf-8")
    told = set(re.findall(r'ConditionUpdate\(\s*\w+, \w+, "(\w+)"', rules))
    assert len(told) > 10
    assert not [reason for reason in (*PRIORITY, *sorted(told)) if f"`{reason}`" not in page]


def test_written_status_is_in_the_schema() -> None:
    """What the API server would prune would be written for ever."""
    world = settled()
    world.fail(world.ready()[0])
    world.annotate(**{"reconcile-at": "x"})
    world.policy = replace(world.policy, gateway_url="http://gateway:8000/v1")
    world.turn()
    assert Status.from_stored(world.status).to_json() == world.status
    assert set(world.status) <= {field.alias for field in Status.model_fields.values()}


@pytest.mark.full
def test_status_of_1000_servers_is_small_and_idle_turn_is_fast() -> None:
    nodes = {f"n{index}": Node(f"n{index}", room=300) for index in range(8)}
    world = World(spec=document(8, 125), nodes=nodes)
    world.settle()
    for name in world.ready():
        world.set_pod(
            name,
            ready=False,
            container=ContainerView(exit_code=1, exit_message="x" * 4096, restarts=1),
        )
    world.turn()
    for name in list(world.pods):
        world.fail(name, message="y" * 4096)
    world.turn()
    assert len(json.dumps(world.status)) < 300_000
    for seconds, spans, replicas in ((0.1, 8, 125), (0.002, 5, 2)):
        world = World(spec=document(spans, replicas), nodes=nodes)
        world.settle()
        seen = world.observe()
        assert _least_cpu_seconds(world, seen) < seconds


def _least_cpu_seconds(world: World, seen: Any) -> float:
    took = []
    for _ in range(7):
        started = time.process_time()
        world.decide(seen)
        took.append(time.process_time() - started)
    return min(took)


def test_status_lists_spans_and_their_servers() -> None:
    world = settled()
    assert world.status["coverageText"] == "2/2"
    assert world.status["spansText"] == "0:4=2/2 4:8=2/2"
    assert world.status["spans"][1]["servers"] == world.ready(1)
    assert world.status["replicas"] == 2
    assert world.status["selector"].endswith(",modelswarm.io/role=server,modelswarm.io/span=0")
    assert world.status["servedName"] == "counting"


def test_documented_numbers_equal_the_policy() -> None:
    folder = Path(__file__).parents[3]
    page = (folder / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    policy = World().policy
    for said in (
        f"after {policy.not_ready_grace:.0f} s its slots",
        f"{policy.mass_outage_count} or more, and more than half",
        f"nothing is replaced for {policy.mass_outage_timeout / 60:.0f} minutes",
        f"wait {policy.backoff_base:.0f}, 4, 8 … {policy.backoff_limit:.0f} s",
        f"run for {policy.stable_after / 60:.0f} minutes",
        f"after {policy.max_restarts} restarts",
        f"(at least {policy.min_budget})",
    ):
        assert said in page, said
    assert (policy.mass_outage_fraction, policy.budget_per_slot, policy.stuck_after) == (
        0.5,
        3,
        60.0,
    )
