"""Holes that a review of the operator looked for: each test is the smallest world that showed one, or refutes it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.operator.model_cluster import World, demo_facts, document

from modelswarm.errors import UserError
from modelswarm.kube.errors import RejectedError
from modelswarm.resources.spec import Model
from modelswarm_operator.controller.executor import Executor
from modelswarm_operator.controller.worker import Workers, WorkItem
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.informer.parsing import pod_view
from modelswarm_operator.informer.resync import Resync
from modelswarm_operator.kube.events import EventRecorder
from modelswarm_operator.kube.resources import SWARM
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.reconcile.manifests.pod_template import apply_patches
from modelswarm_operator.reconcile.model.facts import parse_inspection
from modelswarm_operator.reconcile.pods.inventory import NodeHealth, NodeState
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import Decision, DeletePod, LabelPod, RecordEvent
from modelswarm_operator.reconcile.state.observed import NodeView

Json = dict[str, Any]


def raw_pod(**status: Any) -> Json:
    meta = {"name": "a-12345-s0-1", "uid": "u", "creationTimestamp": "2026-11-21T10:00:00Z"}
    return {"metadata": meta, "spec": {"nodeName": "n9"}, "status": status}


def test_server_container_is_read_beside_a_sidecar() -> None:
    """The kubelet sorts container statuses by name: an `istio-proxy` comes before the `server`."""
    proxy = {"name": "istio-proxy", "ready": True, "restartCount": 0,
             "state": {"running": {"startedAt": "2026-11-21T10:00:00Z"}}}  # fmt: skip
    server = {"name": "server", "ready": False, "restartCount": 7,
              "state": {"waiting": {"reason": "CrashLoopBackOff"}},
              "lastState": {"terminated": {"exitCode": 2, "message": "no weights"}}}  # fmt: skip
    seen = pod_view(raw_pod(containerStatuses=[proxy, server])).container
    assert (seen.restarts, seen.exit_message) == (7, "no weights")


def test_inspection_ends_with_its_container_beside_a_sidecar() -> None:
    world = World(spec=document(model={"source": "pvc://claim/model"}))
    for _ in range(3):
        world.turn()
        world.pass_time()
    [name] = world.pods
    ended = replace(world.pods[name].view.container, exit_code=0, exit_message=demo_facts())
    world.set_pod(name, phase="Running", container=ended)
    assert [a.name for a in world.decide().actions if isinstance(a, DeletePod)] == [name]


HOSTILE = [
    "[" * 4000,
    '{"a":' * 800,
    "null",
    "5",
    "{}",
    json.dumps({**json.loads(demo_facts()), "blocks": 10**15}),
    json.dumps({**json.loads(demo_facts()), "blocks": -1}),
    json.dumps({**json.loads(demo_facts()), "blocks": True}),
    json.dumps({**json.loads(demo_facts()), "revision": {"a": 1}}),
    json.dumps({**json.loads(demo_facts()), "family": 7}),
    json.dumps({**json.loads(demo_facts()), "context": 1e308}),
    json.dumps({**json.loads(demo_facts()), "context": float("inf")}),
    json.dumps({**json.loads(demo_facts()), "blockElements": "x"}),
    json.dumps({**json.loads(demo_facts()), "blockElements": {"a": 1}}),
    json.dumps({**json.loads(demo_facts()), "tied": "perhaps"}),
    json.dumps({**json.loads(demo_facts()), "dtype": ["x"]}),
]


@pytest.mark.parametrize("words", HOSTILE, ids=lambda words: words[:20] + str(len(words)))
def test_malformed_inspection_output_is_a_user_error(words: str) -> None:
    with pytest.raises(UserError):
        parse_inspection(Model.model_validate({"source": "pvc://claim/model"}), words)


POD: Json = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "a", "labels": {"modelswarm.io/role": "server"}, "annotations": {}},
    "spec": {
        "containers": [{"name": "server", "args": ["--x"], "env": [{"name": "POD_IP"}],
                        "ports": [{"name": "links", "containerPort": 7000}]}],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    },
}  # fmt: skip
PATCHES: list[Json] = [
    {"$patch": "replace"},
    {"$patch": "delete"},
    {"$patch": "replace", "spec": 5, "metadata": []},
    {"$patch": "replace", "spec": {"containers": {"a": 1}}},
    {"$patch": "replace", "spec": {"containers": ["server"]}},
    {"metadata": None},
    {"spec": None},
    {"metadata": {"labels": None, "annotations": None}},
    {"metadata": {"$patch": "replace", "labels": "x"}},
    {"metadata": {"$patch": "replace", "labels": ["x"]}},
    {"spec": {"$patch": "replace", "containers": "server"}},
    {"spec": {"containers": [{"$patch": "replace"}, "server"]}},
    {"spec": {"containers": [{"$patch": "replace"}, {"name": "server", "env": "x"}]}},
    {"spec": {"containers": [{"$patch": "replace"}, {"name": "server", "ports": [1]}]}},
    {"spec": {"containers": [{"name": "server", "$patch": "replace", "env": {"a": 1}}]}},
    {"$deleteFromPrimitiveList/spec": ["containers"]},
    {"$deleteFromPrimitiveList/metadata": ["labels"]},
    {"metadata": {"$deleteFromPrimitiveList/labels": ["modelswarm.io/role"]}},
    {"spec": {"$deleteFromPrimitiveList/containers": [POD["spec"]["containers"][0]]}},
    {"$retainKeys": []},
    {"spec": {"$retainKeys": ["volumes"]}},
    {"$retainKeys": ["kind"], "kind": "Secret"},
    {"spec": {"containers": [{"name": {"a": 1}}]}},
]


@pytest.mark.parametrize("patch", PATCHES, ids=str)
def test_pod_template_patch_keeps_required_fields_or_is_refused(patch: Json) -> None:
    """Anything else would fail every turn of the swarm without a condition that tells why."""
    try:
        pod, _ = apply_patches(POD, [("spec.pools[0].podTemplate", patch)])
    except UserError:
        return
    assert pod["kind"] == "Pod" and pod["metadata"]["name"] == "a"
    assert pod["metadata"]["labels"]["modelswarm.io/role"] == "server"
    assert pod["spec"]["containers"][0]["args"] == ["--x"]


def test_just_scheduled_pod_waits_for_its_unknown_node() -> None:
    """An autoscaler's node: the pod's event may come before the node's."""
    pod = pod_view(raw_pod(conditions=[
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-21T10:30:00Z"}
    ]))  # fmt: skip
    now = pod.created + 1801.0
    others = {"n0": NodeView("n0", ready=True)}
    assert NodeHealth(others, World().policy, now).node_state_of(pod) is NodeState.UNREADY
    assert NodeHealth(others, World().policy, now + 60.0).node_state_of(pod) is NodeState.DELETED


def test_unneeded_child_that_was_refused_is_no_problem() -> None:
    world = World()
    world.settle()
    what = f"PodDisruptionBudget/{names.budget_name('counting', 1)}"
    world.rejected[what] = "forbidden"  # refused once, and right by now
    world.settle()
    assert world.condition("Degraded")["status"] == "False"
    world.edit(replicas=0)
    world.settle()
    assert world.condition("Degraded")["status"] == "False"


def test_failures_with_future_timestamps_are_forgotten() -> None:
    world = World()
    world.settle()
    world.now += 10_000_000.0
    world.fail(world.ready(0)[0])
    world.settle()
    world.fail(world.ready(0)[0])
    world.settle()
    world.now -= 10_000_000.0 - 100.0
    for _ in range(80):
        world.turn()
        world.pass_time(10.0)
    assert "slots" not in world.status, world.status["slots"]


def test_rollout_stopped_by_quota_continues_without_surge() -> None:
    world = World(quota=4)
    world.settle()
    world.edit(sessions={"maxLength": 64})
    for _ in range(60):
        world.turn()
        world.pass_time(10.0)
    assert len(world.ready()) == 4
    world.edit(rollout={"surge": 0})
    for _ in range(400):
        world.turn()
        world.pass_time(5.0)
        assert world.coverage() >= 1
    assert world.condition("Progressing")["reason"] == "Settled", world.status["conditions"]


def test_new_spans_are_rolled_out_in_a_full_cluster() -> None:
    world = World()
    for node in world.nodes.values():
        node.room = 1
    world.settle()
    world.edit(spans={"ranges": [{"first": 0, "last": 2}, {"first": 2, "last": 8}]})
    for _ in range(300):
        world.turn()
        world.pass_time(1.0)
        assert world.coverage() >= 1
    assert world.condition("Progressing")["reason"] == "Settled", world.status["conditions"]


def test_token_in_an_exit_message_is_redacted() -> None:
    token = "hf_" + "aB3" * 12
    ended = {"exitCode": 1, "message": f"401 for Authorization: Bearer {token}"}
    server = {"name": "server", "state": {"terminated": ended}}
    assert token not in pod_view(raw_pod(containerStatuses=[server])).container.exit_message


def test_pod_without_capacity_moves_to_another_pool() -> None:
    world = World(spec=document(spans=1, replicas=1, pools=[{"name": "a"}, {"name": "b"}]))
    world.turn()
    [name] = world.pods
    full = world.pods[name].view.annotations[names.POOL]
    world.set_pod(name, unschedulable="0/4 nodes are available: 4 Insufficient nvidia.com/gpu.")
    world.now += world.policy.pool_timeout - 1.0
    assert not [todo for todo in world.todo() if "create" in todo]
    world.turn()
    world.now += 1.0
    world.turn()
    [other] = world.pods.values()
    assert other.name != name
    assert other.view.annotations[names.POOL] != full


def test_pod_creation_precedes_labels_and_children() -> None:
    """A turn ends at the first write that fails: labels and Services must not stand before pods."""
    world = World()
    world.settle()
    first, second = world.ready(0)
    world.set_pod(first, labels={**world.pods[first].view.labels, names.SPAN: "9"})
    world.fail(second)
    world.children.clear()
    kinds = [type(action).__name__ for action in world.decide().actions]
    assert kinds.index("CreatePod") < kinds.index("LabelPod") < kinds.index("ApplyChild")


def test_thousands_of_active_turns_do_not_overflow_the_delay() -> None:
    turns, sleeper = object.__new__(Workers), WorkItem(active_turns=5000)
    turns._schedule_next(sleeper, Decision([RecordEvent("Normal", "Any", "thing")], None))
    assert sleeper.active_turns == 5001


class Answers:
    """What an API server says of one swarm, its pod and a node that is newer than any event."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        meta = {"namespace": "models", "creationTimestamp": "2026-11-21T10:00:00Z"}
        self.swarm: Json = {
            "metadata": {**meta, "name": "counting", "uid": "S", "resourceVersion": "5"},
            "spec": document(),
        }
        owner = {"kind": "ModelSwarm", "name": "counting", "uid": "S", "controller": True}
        owner["apiVersion"] = "modelswarm.io/v1alpha1"
        labels = {names.SWARM_UID: "S", names.ROLE: names.SERVER}
        self.pod: Json = {
            "metadata": {**meta, "name": "p-1", "uid": "P", "resourceVersion": "7",
                         "labels": labels, "ownerReferences": [owner]},
            "spec": {"nodeName": "fresh"},
        }  # fmt: skip
        self.node: Json = {"metadata": {"name": "fresh", "uid": "N", "resourceVersion": "6"}}

    async def get(self, path: str) -> Json:
        return self.swarm

    async def list_all(self, path: str, query: Json) -> tuple[list[Json], int]:
        kind = path.rpartition("/")[2]
        self.listed.append(kind)
        return [{"pods": self.pod, "nodes": self.node}[kind]], 9


async def test_resync_lists_nodes_that_pods_name_and_the_cache_lacks() -> None:
    """A watch of nodes that hangs while the one of pods does not: else every new node's pods would go."""
    api: Any = Answers()
    cache = Cache()
    cache.can_read_nodes = True
    cache.apply_event(SWARM, False, api.swarm)
    seen = cache.observed("S")
    assert seen is not None
    resync = Resync(api, cache, Metrics(), ())
    await resync.resync_swarm(seen.swarm)
    assert api.listed == ["pods", "nodes"]
    seen = cache.observed("S")
    assert seen is not None and seen.nodes is not None
    assert [pod.node for pod in seen.pods] == ["fresh"] and "fresh" in seen.nodes
    await resync.resync_swarm(seen.swarm)
    assert api.listed == ["pods", "nodes", "pods"]


class Refuses:
    """An API server whose admission lets no pod's labels be changed."""

    async def patch(self, path: str, body: Json) -> Json:
        raise RejectedError(403, "Forbidden", "denied by policy")


async def test_refused_label_does_not_fail_the_turn() -> None:
    """A failing turn is repeated after up to a minute, and deaf to events until then."""
    api: Any = Refuses()
    apply = Executor(api, Cache(), EventRecorder(api, "me"), Metrics(), lambda uids: None)
    label = LabelPod("p-1", "P", {names.SPAN: "0"})
    await apply.execute(World().observe().swarm, [label])
