"""A model of Kubernetes in virtual time: an API server, a scheduler and kubelets; thousands of steps a second.

The operator's pure core decides on its state. Its actions are carried out as by the executor, and can be cut off after
any number of them. Nothing of the operator is replaced.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import Any

from modelswarm.checkpoint.inspection import facts_document, inspect_model
from modelswarm.resources.spec import Spec
from modelswarm_operator.reconcile.reconciler import reconcile
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import (
    ApplyChild,
    CreatePod,
    Decision,
    DeleteChild,
    DeletePod,
    LabelPod,
    RecordEvent,
    SetFinalizer,
    WriteStatus,
)
from modelswarm_operator.reconcile.state.observed import (
    ContainerView,
    NodeView,
    Observed,
    PodView,
    SwarmView,
)
from modelswarm_operator.reconcile.state.policy import Policy

Json = dict[str, Any]
SECONDS_TO_START = 5.0  # the longest start of a pod
SECONDS_TO_STOP = 1.0
POLICY = Policy(server_image="registry.example/server:1")


@cache
def inspect_demo_model() -> str:
    """Return the output of an inspection of the demo model."""
    found = inspect_model("demo://counting")
    return json.dumps(facts_document(found.facts, "c0ffee"))


@dataclass(slots=True)
class Node:
    name: str
    capacity: int = 4  # pods per node
    ready: bool = True
    not_ready_since: float | None = None
    departing: str = ""
    out_of_service: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Pod:
    view: PodView
    manifest: Json
    scheduled_at: float = 0.0

    @property
    def name(self) -> str:
        return self.view.name

    @property
    def is_finished(self) -> bool:
        return self.view.phase in ("Failed", "Succeeded")


def make_spec(spans: int = 2, replicas: int = 2, **more: Any) -> Json:
    return {
        "model": {"source": "demo://counting"},
        "spans": {"count": spans},
        "replicas": replicas,
        **more,
    }


@dataclass
class ModelCluster:
    """One swarm, its pods and children, and the nodes of a cluster. Methods move time and cause faults."""

    spec: Json = field(default_factory=make_spec)
    nodes: dict[str, Node] = field(default_factory=dict)
    policy: Policy = POLICY
    now: float = 1_000_000.0
    pods: dict[str, Pod] = field(default_factory=dict)
    children: dict[tuple[str, str], Json] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    finalizers: list[str] = field(default_factory=list)
    status: Json = field(default_factory=dict)
    uid: str = "6f1c2f4e-0000-4000-8000-000000000001"
    generation: int = 1
    version: int = 1
    deleting: bool = False
    exists: bool = True
    quota: int | None = None  # pods
    name_taken_by: str = ""
    can_read_nodes: bool = True
    tolerates_all_taints: bool = False  # the pods: the scheduler uses cordoned nodes too
    is_crashing: Callable[[Pod], bool] = lambda pod: False
    inspection_result: Callable[[Pod], tuple[int, str]] = lambda pod: (0, inspect_demo_model())
    rejected: dict[str, str] = field(default_factory=dict)
    events: list[RecordEvent] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    used_incarnations: dict[int, str] = field(default_factory=dict)  # slots, also of deleted pods
    writes: int = 0
    wake_at: float | None = None
    _uids: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        if not self.nodes:
            self.nodes = {name: Node(name) for name in ("n0", "n1", "n2", "n3")}

    # --- actions of the operator -------------------------------------------------------------------------------------

    def observe(self) -> Observed:
        swarm = SwarmView(
            uid=self.uid,
            name="counting",
            namespace="models",
            generation=self.generation,
            resource_version=str(self.version),
            annotations=dict(self.annotations),
            finalizers=tuple(self.finalizers),
            is_deleting=self.deleting,
            spec=Spec.model_validate(self.spec),
            spec_problem="",
            status=copy.deepcopy(self.status),
        )
        return Observed(
            swarm=swarm,
            pods=tuple(pod.view for pod in self.pods.values()),
            nodes=self._node_views() if self.can_read_nodes else None,
            children=dict(self.children),
            taken_name="counting" if self.name_taken_by else "",
            name_taken_by=self.name_taken_by,
            rejected=dict(self.rejected),
        )

    def _node_views(self) -> Mapping[str, NodeView]:
        return {
            node.name: NodeView(
                name=node.name,
                ready=node.ready,
                not_ready_since=node.not_ready_since,
                departing=node.departing,
                out_of_service=node.out_of_service,
                labels=node.labels,
                allocatable=node.allocatable,
            )
            for node in self.nodes.values()
        }

    def decide(self, observed: Observed | None = None) -> Decision:
        return reconcile(observed or self.observe(), self.policy, self.now)

    def run_turn(
        self, observed: Observed | None = None, max_actions: int | None = None
    ) -> Decision:
        """Run one turn of the operator; with `max_actions` it crashes after that many actions."""
        seen = observed or self.observe()
        decision = self.decide(seen)
        for action in list(decision.actions)[:max_actions]:
            if not self.execute_action(action, seen):
                break
        self.wake_at = decision.requeue_at
        return decision

    def execute_action(self, action: object, seen: Observed) -> bool:
        """Carry out one action; return True if the turn continues after it."""
        if not self.exists:
            return False
        match action:
            case WriteStatus(status):
                return self._write_status(status, seen)
            case SetFinalizer(present):
                self._set_finalizer(present)
            case CreatePod(slot, manifest):
                self._create(slot, manifest)
            case DeletePod():
                self._delete(action)
            case LabelPod(name, uid, labels):
                self._label(name, uid, labels)
            case ApplyChild(manifest):
                self._apply(manifest)
            case DeleteChild(kind, name, _):
                self.children.pop((kind, name), None)
            case RecordEvent():
                self.events.append(action)
            case _:
                raise AssertionError(f"unknown action: {action}")
        return True

    def _write_status(self, status: Json, seen: Observed) -> bool:
        if seen.swarm.resource_version != str(self.version):
            self.log.append("conflict")
            return False
        assert status.get("incarnation", 0) >= self.status.get("incarnation", 0)
        self.status = copy.deepcopy(status)
        self.version += 1
        self.writes += 1
        return True

    def _set_finalizer(self, present: bool) -> None:
        if present and names.FINALIZER not in self.finalizers:
            assert not self.deleting, "the API server refuses a new finalizer during deletion"
            self.finalizers.append(names.FINALIZER)
        elif not present and names.FINALIZER in self.finalizers:
            self.finalizers.remove(names.FINALIZER)
        self.version += 1
        self.exists = not (self.deleting and not self.finalizers)

    def _create(self, slot: str, manifest: Json) -> None:
        meta = manifest["metadata"]
        assert not self.deleting, f"{meta['name']} is created for a swarm that is being deleted"
        if meta["name"] in self.pods:
            return  # AlreadyExists: the operator created it before
        if self.quota is not None and len(self.pods) >= self.quota:
            self.rejected[slot] = f"exceeded quota: pods={self.quota}"
            return
        self.rejected.pop(slot, None)
        incarnation = int(meta["labels"][names.INCARNATION])
        assert incarnation <= self.status["incarnation"], (
            "the pod is created before its incarnation is stored"
        )
        assert self.used_incarnations.setdefault(incarnation, slot) == slot, (
            f"incarnation {incarnation} belongs to two slots"
        )
        view = PodView(
            name=meta["name"],
            uid=f"pod-{next(self._uids)}",
            created=self.now,
            labels=meta["labels"],
            annotations=meta["annotations"],
            phase="Pending",
        )
        self.pods[view.name] = Pod(view, manifest)
        self.log.append(f"create {view.name} for {slot}")

    def _delete(self, action: DeletePod) -> None:
        pod = self.pods.get(action.name)
        if pod is None or pod.view.uid != action.uid:
            return
        self.log.append(f"delete {action.name}: {action.reason}")
        if action.grace_seconds == 0 or pod.is_finished or not pod.view.node:
            del self.pods[action.name]
        elif pod.view.deleting_since is None:
            pod.view = replace(pod.view, deleting_since=self.now)

    def _label(self, name: str, uid: str, labels: Mapping[str, str]) -> None:
        pod = self.pods.get(name)
        if pod is not None and pod.view.uid == uid:
            pod.view = replace(pod.view, labels={**pod.view.labels, **labels})

    def _apply(self, manifest: Json) -> None:
        stored = copy.deepcopy(manifest)
        stored["metadata"]["uid"] = f"child-{next(self._uids)}"
        if manifest["kind"] == "Service":  # defaults of the API server
            stored["spec"] |= {"type": "ClusterIP", "sessionAffinity": "None"}
        self.children[manifest["kind"], manifest["metadata"]["name"]] = stored

    # --- the scheduler and the kubelets ------------------------------------------------------------------------------

    def pass_time(self, seconds: float = 1.0) -> None:
        self.now += seconds
        for pod in list(self.pods.values()):
            node = self.nodes.get(pod.view.node)
            if pod.view.node and node is None:
                if self.now - pod.scheduled_at > 100.0:  # the pod garbage collector
                    self.pods.pop(pod.name, None)
            elif node is not None and not node.ready:
                pod.view = replace(pod.view, ready=False)
            else:
                self._kubelet(pod)
        self._schedule()

    def _kubelet(self, pod: Pod) -> None:
        view = pod.view
        if view.deleting_since is not None:
            if self.now >= view.deleting_since + SECONDS_TO_STOP:
                self.pods.pop(view.name, None)
        elif (
            view.node
            and not pod.is_finished
            and self.now >= pod.scheduled_at + _compute_start_seconds(view)
        ):
            if view.labels.get(names.ROLE) == names.INSPECT:
                self._inspect(pod)
            elif self.is_crashing(pod):
                self._crash(pod)
            else:
                running = ContainerView(
                    ready=True, started=True, restarts=view.container.restarts,
                    running_since=view.container.running_since or self.now,
                )  # fmt: skip
                pod.view = replace(view, phase="Running", ready=True, container=running)

    def _inspect(self, pod: Pod) -> None:
        code, output = self.inspection_result(pod)
        container = ContainerView(
            exit_code=code, exit_reason="Error" if code else "Completed", exit_message=output
        )
        pod.view = replace(pod.view, phase="Failed" if code else "Succeeded", container=container)

    def _crash(self, pod: Pod) -> None:
        container = ContainerView(
            restarts=pod.view.container.restarts + 1, waiting="CrashLoopBackOff", exit_code=1,
            exit_reason="Error", exit_message="boom",
        )  # fmt: skip
        pod.view = replace(pod.view, phase="Running", ready=False, container=container)

    def _schedule(self) -> None:
        load = Counter(pod.view.node for pod in self.pods.values() if not pod.is_finished)
        usable = [
            node
            for node in self.nodes.values()
            if (node.ready and not node.departing and not node.out_of_service)
            or self.tolerates_all_taints
        ]
        for pod in self.pods.values():
            if pod.view.node or pod.is_finished or pod.view.deleting_since is not None:
                continue
            free = [node for node in usable if load[node.name] < node.capacity]
            if free:
                node = min(free, key=lambda node: (load[node.name], node.name))
                pod.view = replace(pod.view, node=node.name, unschedulable="")
                pod.scheduled_at = self.now
                load[node.name] += 1
            else:
                nodes = len(self.nodes)
                message = f"0/{nodes} nodes are available: {nodes} Insufficient cpu."
                pod.view = replace(pod.view, unschedulable=message)

    # --- edits by users, and faults ----------------------------------------------------------------------------------

    def edit_spec(self, **changes: Any) -> None:
        self.spec = {**self.spec, **changes}
        self.generation += 1
        self.version += 1

    def annotate(self, **annotations: str) -> None:
        self.annotations |= {f"{names.DOMAIN}/{key}": value for key, value in annotations.items()}
        self.version += 1

    def delete_swarm(self) -> None:
        if self.finalizers:
            self.deleting = True
            self.version += 1
        else:
            self.exists = False

    def delete_pod(self, name: str) -> None:
        """Do what `kubectl delete pod` does."""
        pod = self.pods[name]
        self._delete(DeletePod(name, pod.view.uid, "kubectl"))

    def force_delete_pod(self, name: str) -> None:
        """Do what `kubectl delete pod --force` does."""
        self.pods.pop(name, None)

    def fail_pod(self, name: str, reason: str = "Evicted", message: str = "low on memory") -> None:
        pod = self.pods[name]
        pod.view = replace(pod.view, phase="Failed", ready=False, reason=reason, message=message)

    def set_pod(self, name: str, **changes: Any) -> None:
        pod = self.pods[name]
        pod.view = replace(pod.view, **changes)

    def set_node_not_ready(self, name: str) -> None:
        node = self.nodes[name]
        if node.ready:
            node.ready, node.not_ready_since = False, self.now

    def set_node_ready(self, name: str) -> None:
        node = self.nodes[name]
        node.ready, node.not_ready_since = True, None

    def delete_node(self, name: str) -> None:
        self.nodes.pop(name, None)

    # --- state that tests read ---------------------------------------------------------------------------------------

    def server_pods(self) -> list[Pod]:
        return [
            pod for pod in self.pods.values() if pod.view.labels.get(names.ROLE) == names.SERVER
        ]

    def ready_pods(self, span: int | None = None) -> list[str]:
        return sorted(
            pod.name
            for pod in self.server_pods()
            if pod.view.ready
            and pod.view.deleting_since is None
            and span in (None, int(pod.view.labels[names.SPAN]))
        )

    def coverage(self) -> int:
        """Return the smallest number of ready servers over the 8 blocks of the model."""
        cover = [0] * 8
        for pod in self.server_pods():
            node = self.nodes.get(pod.view.node)
            serves = (
                pod.view.ready
                and pod.view.deleting_since is None
                and node is not None
                and node.ready
            )
            if serves:
                first, last = pod.view.annotations[names.BLOCKS].split(":")
                for block in range(int(first), int(last)):
                    cover[block] += 1
        return min(cover)

    def condition(self, kind: str) -> Json:
        found = [each for each in self.status.get("conditions", []) if each["type"] == kind]
        return dict(found[0]) if found else {}

    def settle(self, rounds: int = 100, seconds: float = 1.0) -> int:
        """Run turns and time until nothing changes for the longest start and stop; return the number of rounds."""
        quiet = 0
        for number in range(rounds):
            decision = self.run_turn()
            before = {name: pod.view for name, pod in self.pods.items()}
            self.pass_time(seconds)
            after = {name: pod.view for name, pod in self.pods.items()}
            quiet = 0 if decision.actions or before != after else quiet + 1
            if quiet > (SECONDS_TO_START + SECONDS_TO_STOP) / seconds + 1:
                return number
        raise AssertionError(
            f"not settled after {rounds} rounds: {self.log[-20:]} {self.pending_actions()}"
        )

    def pending_actions(self) -> list[str]:
        """Return a short text for each action that a turn would carry out now."""
        return [_describe_action(action) for action in self.decide().actions]


def _compute_start_seconds(pod: PodView) -> float:
    """Return the start time of a pod. It varies, so that pods become ready in different orders."""
    return 1.0 + names.incarnation_of_name(pod.name) * 7 % 5


def _describe_action(action: object) -> str:
    match action:
        case CreatePod(slot, manifest):
            return f"create {manifest['metadata']['name']} for {slot}"
        case ApplyChild(manifest):
            return f"apply {manifest['kind']} {manifest['metadata']['name']}"
        case WriteStatus(status):
            return f"write {status}"
    return str(action)
