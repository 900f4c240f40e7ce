"""Suspected faults from a review of the operator: each test is the smallest case that shows or refutes one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.operator.model_cluster import ModelCluster, inspect_demo_model, make_spec

from modelswarm.errors import UserError
from modelswarm.kube.errors import ConflictError, NotFoundError, RejectedError
from modelswarm.resources.spec import Model, Spec
from modelswarm_operator.controller.executor import Executor
from modelswarm_operator.controller.worker import Workers, WorkItem
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.informer.parsing import OUT_OF_SERVICE, pod_view
from modelswarm_operator.informer.resync import Resync
from modelswarm_operator.kube.events import EventRecorder
from modelswarm_operator.kube.resources import NODE, SWARM
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.reconcile.manifests.pod_template import apply_patches
from modelswarm_operator.reconcile.model.facts import parse_inspection
from modelswarm_operator.reconcile.model.span_plan import make_layout
from modelswarm_operator.reconcile.pods.inventory import NodeHealth, NodeState
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import (
    Action,
    ApplyChild,
    CreatePod,
    Decision,
    DeleteChild,
    DeletePod,
    LabelPod,
    RecordEvent,
)
from modelswarm_operator.reconcile.state.observed import NodeView

Json = dict[str, Any]


def make_pod(**status: Any) -> Json:
    meta = {"name": "a-12345-s0-1", "uid": "u", "creationTimestamp": "2026-11-21T10:00:00Z"}
    return {"metadata": meta, "spec": {"nodeName": "n9"}, "status": status}


def test_server_container_is_read_beside_a_sidecar() -> None:
    """The kubelet sorts container statuses by name, so `istio-proxy` comes before `server`."""
    proxy = {"name": "istio-proxy", "ready": True, "restartCount": 0,
             "state": {"running": {"startedAt": "2026-11-21T10:00:00Z"}}}  # fmt: skip
    server = {"name": "server", "ready": False, "restartCount": 7,
              "state": {"waiting": {"reason": "CrashLoopBackOff"}},
              "lastState": {"terminated": {"exitCode": 2, "message": "no weights"}}}  # fmt: skip
    container = pod_view(make_pod(containerStatuses=[proxy, server])).container
    assert (container.restarts, container.exit_message) == (7, "no weights")


@pytest.mark.parametrize("place", ["state", "lastState"])
def test_run_of_an_ended_container_is_read(place: str) -> None:
    times = {"startedAt": "2026-11-21T10:00:00Z", "finishedAt": "2026-11-22T10:00:30Z"}
    server = {"name": "server", "ready": False, "restartCount": 7, place: {"terminated": times}}
    assert pod_view(make_pod(containerStatuses=[server])).container.ran == 86430.0
    server[place] = {"terminated": {"exitCode": 255, "startedAt": None, "finishedAt": None}}
    assert pod_view(make_pod(containerStatuses=[server])).container.ran == 0.0


def test_inspection_ends_with_its_container_beside_a_sidecar() -> None:
    cluster = ModelCluster(spec=make_spec(model={"source": "pvc://claim/model"}))
    for _ in range(3):
        cluster.run_turn()
        cluster.pass_time()
    [name] = cluster.pods
    ended = replace(
        cluster.pods[name].view.container, exit_code=0, exit_message=inspect_demo_model()
    )
    cluster.set_pod(name, phase="Running", container=ended)
    assert [a.name for a in cluster.decide().actions if isinstance(a, DeletePod)] == [name]


MALFORMED_OUTPUTS = [
    "[" * 4000,
    '{"a":' * 800,
    "null",
    "5",
    "{}",
    json.dumps({**json.loads(inspect_demo_model()), "blocks": 10**15}),
    json.dumps({**json.loads(inspect_demo_model()), "blocks": -1}),
    json.dumps({**json.loads(inspect_demo_model()), "blocks": True}),
    json.dumps({**json.loads(inspect_demo_model()), "revision": {"a": 1}}),
    json.dumps({**json.loads(inspect_demo_model()), "family": 7}),
    json.dumps({**json.loads(inspect_demo_model()), "context": 1e308}),
    json.dumps({**json.loads(inspect_demo_model()), "context": float("inf")}),
    json.dumps({**json.loads(inspect_demo_model()), "blockElements": "x"}),
    json.dumps({**json.loads(inspect_demo_model()), "blockElements": {"a": 1}}),
    json.dumps({**json.loads(inspect_demo_model()), "tied": "perhaps"}),
    json.dumps({**json.loads(inspect_demo_model()), "dtype": ["x"]}),
]


@pytest.mark.parametrize(
    "output", MALFORMED_OUTPUTS, ids=lambda output: output[:20] + str(len(output))
)
def test_malformed_inspection_output_is_a_user_error(output: str) -> None:
    with pytest.raises(UserError):
        parse_inspection(Model.model_validate({"source": "pvc://claim/model"}), output)


def test_scaled_swarm_of_a_stored_plan_is_refused_above_the_most() -> None:
    """The number of automatic spans is not in the document, so no rule of the API server sees the product."""
    large = json.dumps({**json.loads(inspect_demo_model()), "blockElements": 100_000_000})
    known = parse_inspection(Model.model_validate({"source": "pvc://claim/model"}), large)
    pools = [{"name": "cpu", "resources": {"limits": {"memory": "3000Mi"}}}]
    spec = Spec.model_validate({"model": {"source": "pvc://claim/model"}, "pools": pools})
    stored = make_layout("a", spec, known, None).plan
    assert len(stored.spans) > 4
    scaled = spec.model_copy(update={"replicas": 1000})
    with pytest.raises(UserError, match=r"^spec\.replicas: 1000 servers for each of \d+ spans"):
        make_layout("a", scaled, known, stored)


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
REFUSED_PATCHES: list[Json] = [
    {"$patch": "replace"},
    {"$patch": "delete"},
    {"$patch": "replace", "spec": 5, "metadata": []},
    {"$patch": "replace", "spec": {"containers": {"a": 1}}},
    {"$patch": "replace", "spec": {"containers": ["server"]}},
    {"metadata": None},
    {"spec": None},
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
    {"$retainKeys": ["kind"], "kind": "Secret"},
    {"spec": {"containers": [{"name": {"a": 1}}]}},
]
ACCEPTED_PATCHES: list[Json] = [
    {"metadata": {"labels": None, "annotations": None}},
    {"spec": {"$retainKeys": ["volumes"]}},
]


@pytest.mark.parametrize("patch", REFUSED_PATCHES, ids=str)
def test_patch_that_leaves_no_valid_pod_is_refused(patch: Json) -> None:
    """Every turn of such a swarm would fail without a condition that explains it."""
    with pytest.raises(UserError, match=r"spec\.pools\[0\]\.podTemplate"):
        apply_patches(POD, [("spec.pools[0].podTemplate", patch)])


@pytest.mark.parametrize("patch", ACCEPTED_PATCHES, ids=str)
def test_accepted_patch_keeps_the_fields_of_the_operator(patch: Json) -> None:
    pod, _ = apply_patches(POD, [("spec.pools[0].podTemplate", patch)])
    assert pod["kind"] == "Pod" and pod["metadata"]["name"] == "a"
    assert pod["metadata"]["labels"]["modelswarm.io/role"] == "server"
    assert pod["spec"]["containers"][0]["args"] == ["--x"]


def test_just_scheduled_pod_waits_for_its_unknown_node() -> None:
    """With an autoscaler, the pod's event may come before the event of its new node."""
    pod = pod_view(make_pod(conditions=[
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-21T10:30:00Z"}
    ]))  # fmt: skip
    now = pod.created + 1801.0
    others = {"n0": NodeView("n0", ready=True)}
    assert NodeHealth(others, ModelCluster().policy, now).node_state_of(pod) is NodeState.UNREADY
    assert (
        NodeHealth(others, ModelCluster().policy, now + 60.0).node_state_of(pod)
        is NodeState.DELETED
    )


def test_unneeded_child_that_was_refused_is_no_problem() -> None:
    cluster = ModelCluster()
    cluster.settle()
    what = f"PodDisruptionBudget/{names.budget_name('counting', 1)}"
    cluster.rejected[what] = "forbidden"  # refused once, then applied
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"
    cluster.edit_spec(replicas=0)
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"


def test_failures_with_future_timestamps_are_forgotten() -> None:
    cluster = ModelCluster()
    cluster.settle()
    cluster.now += 10_000_000.0
    cluster.fail_pod(cluster.ready_pods(0)[0])
    cluster.settle()
    cluster.fail_pod(cluster.ready_pods(0)[0])
    cluster.settle()
    cluster.now -= 10_000_000.0 - 100.0
    for _ in range(80):
        cluster.run_turn()
        cluster.pass_time(10.0)
    assert "slots" not in cluster.status, cluster.status["slots"]


def test_rollout_stopped_by_quota_continues_without_surge() -> None:
    cluster = ModelCluster(quota=4)
    cluster.settle()
    cluster.edit_spec(sessions={"maxLength": 64})
    for _ in range(60):
        cluster.run_turn()
        cluster.pass_time(10.0)
    assert len(cluster.ready_pods()) == 4
    cluster.edit_spec(rollout={"surge": 0})
    for _ in range(400):
        cluster.run_turn()
        cluster.pass_time(5.0)
        assert cluster.coverage() >= 1
    assert cluster.condition("Progressing")["reason"] == "Settled", cluster.status["conditions"]


def test_new_spans_are_rolled_out_in_a_full_cluster() -> None:
    cluster = ModelCluster()
    for node in cluster.nodes.values():
        node.capacity = 1
    cluster.settle()
    cluster.edit_spec(spans={"ranges": [{"first": 0, "last": 2}, {"first": 2, "last": 8}]})
    for _ in range(300):
        cluster.run_turn()
        cluster.pass_time(1.0)
        assert cluster.coverage() >= 1
    assert cluster.condition("Progressing")["reason"] == "Settled", cluster.status["conditions"]


@pytest.mark.parametrize(("ahead", "following"), [(900_000, 900_005), (10**15 - 5, 5)])
def test_forged_incarnation_is_not_counted_on(ahead: int, following: int) -> None:
    """Counting continues from a number that a lost status explains. The other number has no successor of 15 digits."""
    cluster = ModelCluster()
    cluster.settle()
    pod = next(iter(cluster.pods.values()))
    name = f"{pod.name.rpartition('-')[0]}-{4 + ahead}"
    forged = replace(pod.view, name=name, uid="forged", annotations={}, labels={})
    cluster.pods[name] = replace(pod, view=forged)

    cluster.delete_pod(cluster.ready_pods()[0])
    cluster.settle()

    assert cluster.status["incarnation"] == following
    assert len(cluster.ready_pods()) == 4
    assert all("incarnation" not in slot for slot in cluster.status.get("slots", ()))


def test_token_in_an_exit_message_is_redacted() -> None:
    token = "hf_" + "aB3" * 12
    ended = {"exitCode": 1, "message": f"401 for Authorization: Bearer {token}"}
    server = {"name": "server", "state": {"terminated": ended}}
    assert token not in pod_view(make_pod(containerStatuses=[server])).container.exit_message


def test_pod_without_capacity_moves_to_another_pool() -> None:
    cluster = ModelCluster(
        spec=make_spec(spans=1, replicas=1, pools=[{"name": "a"}, {"name": "b"}])
    )
    cluster.run_turn()
    [name] = cluster.pods
    full = cluster.pods[name].view.annotations[names.POOL]
    cluster.set_pod(name, unschedulable="0/4 nodes are available: 4 Insufficient nvidia.com/gpu.")
    cluster.now += cluster.policy.pool_timeout - 1.0
    assert not [todo for todo in cluster.pending_actions() if "create" in todo]
    cluster.run_turn()
    cluster.now += 1.0
    cluster.run_turn()
    [other] = cluster.pods.values()
    assert other.name != name
    assert other.view.annotations[names.POOL] != full


def test_pod_without_capacity_tries_every_pool_in_turn() -> None:
    """Two full pools must not take turns for ever beside a third that has room."""
    cluster = ModelCluster(spec=make_spec(1, 1, pools=[{"name": name} for name in "abc"]))
    tried = []
    for _ in range(6):
        cluster.run_turn()
        [pod] = cluster.pods.values()
        tried.append(pod.view.annotations[names.POOL])
        cluster.set_pod(pod.name, unschedulable="0/4 nodes are available: 4 Insufficient cpu.")
        cluster.now += cluster.policy.pool_timeout
    assert tried == ["a", "b", "c", "a", "b", "c"]


def test_rollout_goes_on_in_the_pool_that_has_room() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1, pools=[{"name": "a"}, {"name": "b"}]))
    cluster.settle()
    [old] = cluster.pods
    cluster.set_pod(old, annotations={**cluster.pods[old].view.annotations, names.POOL: "b"})
    cluster.run_turn()
    [name] = set(cluster.pods) - {old}
    assert cluster.pods[name].view.annotations[names.POOL] == "a"
    cluster.set_pod(name, unschedulable="0/4 nodes are available: 4 Insufficient cpu.")
    cluster.now += cluster.policy.pool_timeout
    cluster.run_turn()
    [other] = set(cluster.pods) - {old, name}
    assert cluster.pods[other].view.annotations[names.POOL] == "b"
    cluster.settle()
    assert cluster.ready_pods() == [other]


def test_pod_creation_precedes_labels_and_children() -> None:
    """A turn ends at the first failed write, so labels and Services, which a webhook may refuse, come after pods."""
    cluster = ModelCluster()
    cluster.settle()
    first, second = cluster.ready_pods(0)
    cluster.set_pod(first, labels={**cluster.pods[first].view.labels, names.SPAN: "9"})
    cluster.fail_pod(second)
    cluster.children.clear()
    kinds = [type(action).__name__ for action in cluster.decide().actions]
    assert kinds.index("CreatePod") < kinds.index("LabelPod") < kinds.index("ApplyChild")


def test_thousands_of_active_turns_do_not_overflow_the_delay() -> None:
    workers, item = object.__new__(Workers), WorkItem(active_turns=5000)
    workers._schedule_next(item, Decision([RecordEvent("Normal", "Any", "thing")], None))
    assert item.active_turns == 5001


class OneSwarmApi:
    """An API server with one swarm, its pod and a node that no event has shown yet."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        meta = {"namespace": "models", "creationTimestamp": "2026-11-21T10:00:00Z"}
        self.swarm: Json = {
            "metadata": {**meta, "name": "counting", "uid": "S", "resourceVersion": "5"},
            "spec": make_spec(),
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
    """A stalled watch of nodes would otherwise force-delete the pods of every new node."""
    api: Any = OneSwarmApi()
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


async def test_resync_lists_nodes_that_seem_to_be_out_of_service() -> None:
    """Otherwise new pods of a node that came back were force-deleted while the watch of nodes stalls."""
    api: Any = OneSwarmApi()
    cache = Cache()
    cache.can_read_nodes = True
    cache.apply_event(SWARM, False, api.swarm)
    before = {**api.node["metadata"], "resourceVersion": "4"}
    taints = [{"key": OUT_OF_SERVICE}]
    cache.apply_event(NODE, False, {"metadata": before, "spec": {"taints": taints}})
    seen = cache.observed("S")
    assert seen is not None
    await Resync(api, cache, Metrics(), ()).resync_swarm(seen.swarm)
    assert api.listed == ["pods", "nodes"]
    seen = cache.observed("S")
    assert seen is not None and seen.nodes is not None
    assert not seen.nodes["fresh"].out_of_service


class RefusingApi:
    """An API server whose admission refuses every change and deletion."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def get(self, path: str) -> Json:
        raise NotFoundError(404, "NotFound", path)

    async def patch(self, path: str, body: Json) -> Json:
        self.asked.append(path)
        raise RejectedError(403, "Forbidden", "denied by policy")

    async def apply(self, path: str, body: Json, manager: str) -> Json:
        return await self.patch(path, body)

    async def delete(self, path: str, uid: str, grace_seconds: int | None = None) -> Json:
        return await self.patch(path, {})


@pytest.mark.parametrize(
    ("action", "resource"),
    [
        (LabelPod("p-1", "P", {names.SPAN: "0"}), "pods"),
        (DeletePod("p-1", "P", "its node is gone"), "pods"),
        (DeleteChild("PodDisruptionBudget", "b", "B"), "poddisruptionbudgets"),
        (ApplyChild({"kind": "Service", "metadata": {"name": "s"}}), "services"),
    ],
)
async def test_refused_change_is_counted_and_fails_no_turn(action: Action, resource: str) -> None:
    """A failed turn is repeated after up to a minute and ignores events until then."""
    api: Any = RefusingApi()
    metrics = Metrics()
    executor = Executor(api, Cache(), EventRecorder(api, "me"), metrics, lambda uids: None)
    await executor.execute(ModelCluster().observe().swarm, [action])
    assert len(api.asked) == 1
    labels = {"resource": resource}
    name = "modelswarm_operator_rejected_writes_total"
    assert metrics.registry.get_sample_value(name, labels) == 1


class BusyQuotaApi:
    """An API server that others keep from counting a new pod in its quota."""

    def __init__(self) -> None:
        self.events: list[Json] = []

    async def post(self, path: str, body: Json, *, strict: bool = False) -> Json:
        if not path.endswith("/events"):
            raise ConflictError(
                409, "Conflict", "the quota has been modified; please apply your changes"
            )
        self.events.append(body)
        return body


async def test_event_is_recorded_although_the_create_conflicts() -> None:
    """The status has its transition already, so the next turn would record none."""
    api: Any = BusyQuotaApi()
    executor = Executor(api, Cache(), EventRecorder(api, "me"), Metrics(), lambda uids: None)
    create = CreatePod("0-0", {"metadata": {"name": "p-1"}})
    event = RecordEvent("Warning", "NotReady", "No server is ready.")
    with pytest.raises(ConflictError):
        await executor.execute(ModelCluster().observe().swarm, [create, event])
    assert [each["reason"] for each in api.events] == ["NotReady"]
