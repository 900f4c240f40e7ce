"""Informer cache: the operator's copy of the cluster, fed by events and responses, replaced by lists.

`watch` feeds events, `executor` the responses to its own writes (so that a turn always knows what the one before it
did), `resync` whole lists. Each call returns the swarms that need a turn; a turn takes `observed`. Nothing here waits
or does I/O; `store` decides which of two versions of an object wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelswarm_operator.informer.parsing import node_view, parse_time, pod_view, swarm_view
from modelswarm_operator.informer.store import Change, Store
from modelswarm_operator.kube.resources import (
    BUDGET,
    NODE,
    POD,
    SERVICE,
    SWARM,
    Kind,
    controller_uid,
)
from modelswarm_operator.reconcile.state.observed import (
    Json,
    NodeView,
    Observed,
    PodView,
    SwarmView,
)


@dataclass(frozen=True, slots=True)
class StoredSwarm:
    """A swarm as stored, with the fields that decide which swarm owns a name that clients give as `model`."""

    view: SwarmView
    created: float
    served_name: str
    names: frozenset[str]  # the served name and those of its adapters
    owned: frozenset[str]  # of its status: names that it had already

    @property
    def full_name(self) -> str:
        return f"{self.view.namespace}/{self.view.name}"


def _stored_swarm(raw: Json) -> StoredSwarm:
    view = swarm_view(raw)
    created = parse_time(raw["metadata"].get("creationTimestamp")) or 0.0
    stored_name = view.status.get("servedName")
    owned = frozenset(filter(None, (stored_name, *view.status.get("adapters", ()))))
    if view.spec is None:  # its servers still have the names of the last spec that could be read
        return StoredSwarm(view, created, stored_name or view.name, owned, owned)
    names = view.spec.model.names(view.name)
    return StoredSwarm(view, created, names[0], frozenset(names), owned)


def _child_view(kind: Kind) -> Callable[[Json], Json]:
    """Return a view without status and managed fields, which change often and matter to no decision."""
    kept = ("name", "namespace", "uid", "labels", "annotations", "ownerReferences")

    def view(raw: Json) -> Json:
        meta = raw["metadata"]
        part = {key: meta[key] for key in (*kept, "deletionTimestamp") if key in meta}
        spec = raw.get("spec") or {}
        return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": part, "spec": spec}

    return view


def _current_rejections(rejected: Mapping[str, str], swarm: SwarmView) -> dict[str, str]:
    """Return them without those of slots that have gone: status has each slot before its pod is created."""
    slots = {one.get("slot") for one in swarm.status.get("slots") or ()}
    return {what: why for what, why in rejected.items() if "/" in what or what in slots}


def _own_uid(raw: Json) -> str:
    return str(raw["metadata"]["uid"])


class Cache:
    def __init__(self) -> None:
        self.swarms: Store[StoredSwarm] = Store(_stored_swarm, _own_uid)
        self.pods: Store[PodView] = Store(pod_view, controller_uid)
        self.nodes: Store[NodeView] = Store(node_view, _own_uid)
        self.services: Store[Json] = Store(_child_view(SERVICE), controller_uid)
        self.budgets: Store[Json] = Store(_child_view(BUDGET), controller_uid)
        self.can_read_nodes = False
        self._nodes: dict[str, NodeView] = {}  # replaced at every change, as turns keep a reference
        self._rejected: dict[str, dict[str, str]] = {}
        self._start_progress: dict[str, str] = {}  # words by the pod's uid
        self._by_name: dict[str, dict[str, StoredSwarm]] = {}  # by name of a model and uid

    def apply_event(self, kind: Kind, deleted: bool, raw: Json) -> set[str]:
        """Store one object of an event or a response. Returns the swarms that need a turn."""
        store = self._store_of(kind)
        if deleted:
            meta = raw["metadata"]
            change = store.delete(meta["uid"], int(meta["resourceVersion"]))
        else:
            change = store.upsert(raw)
        return self._affected_swarms(kind, [change] if change is not None else [])

    def forget(self, kind: Kind, uid: str) -> set[str]:
        """Remove an object that the API server no longer has, without knowing since which version."""
        change = self._store_of(kind).forget(uid)
        return self._affected_swarms(kind, [change] if change is not None else [])

    def replace(self, kind: Kind, items: Sequence[Json], listed: int, owner: str = "") -> set[str]:
        """Replace all objects of a kind (or those of one swarm) by a list as of one moment."""
        return self._affected_swarms(kind, self._store_of(kind).replace(items, listed, owner))

    def _store_of(self, kind: Kind) -> Store[Any]:
        stores: dict[str, Store[Any]] = {
            SWARM.kind: self.swarms,
            POD.kind: self.pods,
            NODE.kind: self.nodes,
            SERVICE.kind: self.services,
            BUDGET.kind: self.budgets,
        }
        return stores[kind.kind]

    def _affected_swarms(self, kind: Kind, changes: Sequence[Change[Any]]) -> set[str]:
        if kind is NODE:
            if changes:
                self._nodes = {node.name: node for node in self.nodes.all()}
            return self.uids() if changes else set()
        if kind is not SWARM:
            return {change.owner for change in changes}
        return {uid for change in changes for uid in self._affected_by_swarm(change)}

    def _affected_by_swarm(self, change: Change[StoredSwarm]) -> set[str]:
        """Return the swarm itself, and those with which it shares or shared a name."""
        before = change.before.names if change.before is not None else frozenset()
        after = change.after.names if change.after is not None else frozenset()
        affected = {change.owner}
        for name in before ^ after:
            affected |= set(self._by_name.get(name, {}))
        for name in before - after:
            namesakes = self._by_name.get(name, {})
            namesakes.pop(change.owner, None)
            if not namesakes:
                self._by_name.pop(name, None)
        for name in after:
            assert change.after is not None
            self._by_name.setdefault(name, {})[change.owner] = change.after
        if change.after is None:
            self._rejected.pop(change.owner, None)
        elif rejected := self._rejected.get(change.owner):
            self._rejected[change.owner] = _current_rejections(rejected, change.after.view)
        return affected

    def uids(self) -> set[str]:
        return {stored.view.uid for stored in self.swarms.all()}

    def record_rejection(self, uid: str, what: str, why: str) -> None:
        self._rejected.setdefault(uid, {})[what] = why

    def clear_rejection(self, uid: str, what: str) -> None:
        self._rejected.get(uid, {}).pop(what, None)

    def set_start_progress(self, words: Mapping[str, str]) -> set[str]:
        """Replace the progress of all starts, by the pod's uid. Returns the swarms that need a turn."""
        before, self._start_progress = self._start_progress, {k: v for k, v in words.items() if v}
        return {
            stored.view.uid
            for stored in self.swarms.all()
            for pod in self._pods_of(stored.view)
            if before.get(pod.uid) != self._start_progress.get(pod.uid)
        }

    def owned_pods(self) -> list[PodView]:
        """Return the pods of all swarms."""
        return [pod for stored in self.swarms.all() for pod in self._pods_of(stored.view)]

    def observed(self, uid: str) -> Observed | None:
        """Return the input of a turn; None if there is no such swarm."""
        stored = self.swarms.get(uid)
        if stored is None:
            return None
        pods = tuple(self._pods_of(stored.view))
        taken_name, owner = self._taken_name(stored)
        progress = {pod.uid: words for pod in pods if (words := self._start_progress.get(pod.uid))}
        return Observed(
            swarm=stored.view,
            pods=pods,
            nodes=self._nodes if self.can_read_nodes else None,
            children={
                **self._children(SERVICE, stored.view),
                **self._children(BUDGET, stored.view),
            },
            taken_name=taken_name,
            name_taken_by=owner,
            rejected=dict(self._rejected.get(uid, {})),
            start_progress=progress,
        )

    def has_usable_nodes_of(self, swarm: SwarmView) -> bool:
        """Return False if a node of its pods is not known or out of service: those pods are deleted by force."""
        nodes = [self._nodes.get(pod.node) for pod in self._pods_of(swarm) if pod.node]
        return all(node is not None and not node.out_of_service for node in nodes)

    def has_child(self, kind: Kind, swarm: SwarmView, name: str) -> bool:
        return (kind.kind, name) in self._children(kind, swarm)

    def _pods_of(self, swarm: SwarmView) -> list[PodView]:
        """Return the swarm's pods. A controller reference from another namespace is forged, and names no owner."""
        pods = self.pods.objects_of(swarm.uid)
        return [pod for pod in pods if pod.namespace == swarm.namespace]

    def _children(self, kind: Kind, swarm: SwarmView) -> dict[tuple[str, str], Json]:
        found: list[Json] = self._store_of(kind).objects_of(swarm.uid)
        return {
            (kind.kind, child["metadata"]["name"]): child
            for child in found
            if child["metadata"].get("namespace") == swarm.namespace
        }

    def _taken_name(self, stored: StoredSwarm) -> tuple[str, str]:
        """Return the first of its names that another swarm owns, and that swarm; ("", "") if there is none.

        An owner keeps the name. Without one, a model gets it before an adapter, then the oldest swarm; of those created
        in one second, the lower uid.
        """
        for name in sorted(stored.names):

            def rank(other: StoredSwarm, name: str = name) -> tuple[bool, bool, float, str]:
                is_new, is_adapter = name not in other.owned, other.served_name != name
                return (is_new, is_adapter, other.created, other.view.uid)

            first = min(self._by_name.get(name, {}).values(), key=rank, default=stored)
            if first.view.uid != stored.view.uid:
                return name, first.full_name
        return "", ""
