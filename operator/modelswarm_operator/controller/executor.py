"""Carries out the actions of a turn: the only writer.

Called by `worker`, once per turn. Every write can be repeated and is safe if it was decided on a stale view. Status is
written with the resourceVersion that was read. A delete names the uid. Pods are posted under names never used twice.
Responses go into the cache at once, so that the next turn knows them. Decides nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence

from modelswarm.kube.client import KubeClient
from modelswarm.kube.errors import (
    ConflictError,
    KubeError,
    NotFoundError,
    RejectedError,
    ThrottledError,
)
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.informer.parsing import swarm_view
from modelswarm_operator.kube.events import EventRecorder
from modelswarm_operator.kube.resources import (
    CHILDREN,
    FIELD_MANAGER,
    POD,
    SWARM,
    Kind,
    controller_of,
    controller_uid,
)
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.reconcile.manifests.owned_objects import covers
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import (
    Action,
    ApplyChild,
    CreatePod,
    DeleteChild,
    DeletePod,
    LabelPod,
    RecordEvent,
    SetFinalizer,
    WriteStatus,
)
from modelswarm_operator.reconcile.state.observed import NAME_TAKEN, Json, SwarmView

log = logging.getLogger(__name__)
MAX_CONCURRENT_WRITES = 16  # of all swarms together
MAX_STATUS_TRIES = 5  # of a status write that conflicts with other writers
_CONCURRENT = (
    CreatePod,
    DeletePod,
    LabelPod,
    ApplyChild,
    DeleteChild,
)  # consecutive ones of one type may overlap
Enqueue = Callable[[set[str]], None]


class Executor:
    def __init__(
        self,
        client: KubeClient,
        cache: Cache,
        events: EventRecorder,
        metrics: Metrics,
        wake: Enqueue,
    ) -> None:
        self._client = client
        self._cache = cache
        self._events = events
        self._metrics = metrics
        self._enqueue = wake
        self._free_writers = asyncio.Semaphore(MAX_CONCURRENT_WRITES)

    async def execute(self, swarm: SwarmView, actions: Sequence[Action]) -> None:
        """Carry out the actions in order. Raises the first error of the first failing step.

        Of later steps, Events happen if the API server has answered: status has their transitions, so no other turn
        would record them.
        """
        refusal: KubeError | None = None
        for together in _steps(actions):
            if refusal is not None and not isinstance(together[0], RecordEvent):
                continue
            try:
                await self._execute_step(swarm, together)
            except (ConflictError, RejectedError, ThrottledError) as error:
                if isinstance(together[0], WriteStatus):
                    raise
                refusal = error
        if refusal is not None:
            raise refusal

    async def _execute_step(self, swarm: SwarmView, together: Sequence[Action]) -> None:
        if len(together) == 1:
            await self._execute_one(swarm, together[0])
            return
        done = await asyncio.gather(
            *(self._execute_one(swarm, action) for action in together), return_exceptions=True
        )
        for failed in done:
            if failed is not None:
                raise failed

    async def _execute_one(self, swarm: SwarmView, action: Action) -> None:
        async with self._free_writers:
            match action:
                case WriteStatus():
                    await self._write_status(swarm, action.status)
                case SetFinalizer():
                    await self._set_finalizer(swarm, action.present)
                case CreatePod():
                    await self._create_pod(swarm, action)
                case DeletePod():
                    await self._delete_pod(swarm, action)
                case LabelPod():
                    await self._label_pod(swarm, action)
                case ApplyChild():
                    await self._apply_child(swarm, action.manifest)
                case DeleteChild():
                    await self._delete_child(swarm, action)
                case RecordEvent():
                    await self._events.record(swarm, action)

    def _update_cache(self, kind: Kind, raw: Json, *, deleted: bool = False) -> None:
        self._enqueue(self._cache.apply_event(kind, deleted, raw))

    async def _write_status(self, swarm: SwarmView, status: Json) -> None:
        meta = {
            "name": swarm.name,
            "namespace": swarm.namespace,
            "uid": swarm.uid,
            "resourceVersion": swarm.resource_version,
        }
        body = {"apiVersion": SWARM.api_version, "kind": SWARM.kind, "metadata": meta}
        path = SWARM.path(swarm.namespace, swarm.name, "status")
        for _ in range(MAX_STATUS_TRIES):
            try:
                self._update_cache(SWARM, await self._client.put(path, {**body, "status": status}))
                return
            except ConflictError:
                meta["resourceVersion"] = await self._version_if_unchanged(swarm)
        raise ConflictError(409, "Conflict", "other clients keep writing this swarm")

    async def _version_if_unchanged(self, swarm: SwarmView) -> str:
        """Return the new resourceVersion if nothing changed that the turn has read. Raises ConflictError otherwise."""
        raw = await self._client.get(SWARM.path(swarm.namespace, swarm.name))
        self._update_cache(SWARM, raw)
        now = swarm_view(raw)
        if dataclasses.replace(now, resource_version=swarm.resource_version) != swarm:
            raise ConflictError(409, "Conflict", "the swarm was changed during the turn")
        return now.resource_version

    async def _set_finalizer(self, swarm: SwarmView, present: bool) -> None:
        """Write the finalizers with the cache's resourceVersion: a status write of this turn has raised it."""
        stored = self._cache.swarms.get(swarm.uid)
        now = stored.view if stored is not None else swarm
        others = [name for name in now.finalizers if name != names.FINALIZER]
        wanted = [*others, names.FINALIZER] if present else others
        meta = {"uid": now.uid, "resourceVersion": now.resource_version, "finalizers": wanted}
        path = SWARM.path(swarm.namespace, swarm.name)
        try:
            answer = await self._client.patch(path, {"metadata": meta})
        except RejectedError as error:
            # The turn ends before its status, which could tell the reason.
            done = "set" if present else "removed"
            what = f"The swarm's finalizer cannot be {done}: {error}"
            message = f"{what}. It is tried again with growing pauses."
            await self._events.record(swarm, RecordEvent("Warning", "FinalizerRefused", message))
            raise
        self._update_cache(SWARM, answer, deleted=now.is_deleting and not wanted)

    async def _create_pod(self, swarm: SwarmView, action: CreatePod) -> None:
        meta = action.manifest["metadata"]
        name = meta["name"]
        try:
            # Strict: a misspelt field of a pod template is rejected, not dropped without a message.
            pod = await self._client.post(POD.path(swarm.namespace), action.manifest, strict=True)
        except ConflictError as error:
            if not error.already_exists:
                raise
            pod = await self._client.get(POD.path(swarm.namespace, name))
            if not _is_same_pod(pod, action.manifest, swarm):
                self._record_rejection(swarm, action.slot, f"a pod {name} {NAME_TAKEN}")
                return
        except RejectedError as error:
            self._record_rejection(swarm, action.slot, str(error))
            return
        self._cache.clear_rejection(swarm.uid, action.slot)
        self._metrics.created.labels(_role(meta.get("labels"))).inc()
        log.info("%s/%s: slot %s: created %s", swarm.namespace, swarm.name, action.slot, name)
        self._update_cache(POD, pod)

    def _record_rejection(self, swarm: SwarmView, what: str, why: str) -> None:
        """Record a rejected write; the next turn reads it in `Observed.rejected`."""
        self._cache.record_rejection(swarm.uid, what, why)
        kind = CHILDREN[what.partition("/")[0]] if "/" in what else POD
        self._metrics.rejected.labels(kind.plural).inc()
        log.warning("%s/%s: the API server rejected %s: %s", swarm.namespace, swarm.name, what, why)

    async def _delete_pod(self, swarm: SwarmView, action: DeletePod) -> None:
        path = POD.path(swarm.namespace, action.name)
        known = self._cache.pods.get(action.uid)
        try:
            answer = await self._client.delete(path, action.uid, action.grace_seconds)
        except NotFoundError:
            self._enqueue(self._cache.forget(POD, action.uid))
            return
        except ConflictError:
            await self._refresh_pod(path, action.uid)
            return
        except RejectedError as error:  # one pod that a policy keeps delays nothing else
            self._metrics.rejected.labels("pods").inc()
            name = f"{swarm.namespace}/{action.name}"
            log.warning("pod %s: it cannot be deleted: %s", name, error)
            return
        self._metrics.deleted.labels(_role(known.labels if known is not None else {})).inc()
        log.info("%s/%s: deleted %s: %s", swarm.namespace, swarm.name, action.name, action.reason)
        if answer.get("kind") != POD.kind:
            return
        if "resourceVersion" in answer["metadata"]:
            self._update_cache(POD, answer, deleted=_is_deleted_at_once(answer))
        else:  # the API server removed the pod at once and leaves the version out
            self._enqueue(self._cache.forget(POD, action.uid))

    async def _refresh_pod(self, path: str, uid: str) -> None:
        """Read a pod again after a delete that conflicted: another pod has its name, or another client wrote it."""
        try:
            pod = await self._client.get(path)
        except NotFoundError:
            self._enqueue(self._cache.forget(POD, uid))
            return
        if pod["metadata"]["uid"] != uid:
            self._enqueue(self._cache.forget(POD, uid))
        self._update_cache(POD, pod)

    async def _label_pod(self, swarm: SwarmView, action: LabelPod) -> None:
        path = POD.path(swarm.namespace, action.name)
        body = {"metadata": {"uid": action.uid, "labels": dict(action.labels)}}
        try:
            self._update_cache(POD, await self._client.patch(path, body))
        except RejectedError as error:  # one pod's labels delay nothing else
            self._metrics.rejected.labels(POD.plural).inc()
            name = f"{swarm.namespace}/{action.name}"
            log.warning("pod %s: its labels cannot be corrected: %s", name, error)
        except NotFoundError:
            self._enqueue(self._cache.forget(POD, action.uid))
        except ConflictError:
            await self._refresh_pod(path, action.uid)

    async def _apply_child(self, swarm: SwarmView, manifest: Json) -> None:
        kind, name = CHILDREN[manifest["kind"]], manifest["metadata"]["name"]
        path = kind.path(swarm.namespace, name)
        what = f"{kind.kind}/{name}"
        known = self._cache.has_child(kind, swarm, name)
        if not known and await self._is_name_taken(kind, name, swarm):
            self._record_rejection(swarm, what, f"a {kind.kind} {name} {NAME_TAKEN}")
            return
        try:
            self._update_cache(kind, await self._apply_over_edits(path, manifest, known))
        except RejectedError as error:
            self._record_rejection(swarm, what, str(error))
            return
        self._cache.clear_rejection(swarm.uid, what)

    async def _apply_over_edits(self, path: str, manifest: Json, known: bool) -> Json:
        """Apply the manifest. What an edit has added stays beside it: a port, or maxUnavailable of a budget."""
        try:
            answer = await self._client.apply(path, manifest, FIELD_MANAGER)
            if not known or covers(answer, manifest):
                return answer
        except RejectedError:
            if not known:
                raise
        await self._client.patch(path, {"spec": {"maxUnavailable": None, **manifest["spec"]}})
        return await self._client.apply(path, manifest, FIELD_MANAGER)

    async def _is_name_taken(self, kind: Kind, name: str, swarm: SwarmView) -> bool:
        """Return True if another owner's object has this name: apply would take it over without a message.

        An object of an earlier swarm of this name is deleted now: the garbage collector has not reached it yet.
        """
        path = kind.path(swarm.namespace, name)
        try:
            there = await self._client.get(path)
            owner = controller_of(there)
            if owner.get("uid") == swarm.uid:
                return False
            if (owner.get("kind"), owner.get("name")) != (SWARM.kind, swarm.name):
                return True
            await self._client.delete(path, there["metadata"]["uid"])
        except NotFoundError:
            return False
        return False

    async def _delete_child(self, swarm: SwarmView, action: DeleteChild) -> None:
        kind = CHILDREN[action.kind]
        try:
            await self._client.delete(kind.path(swarm.namespace, action.name), action.uid)
        except (NotFoundError, ConflictError) as error:
            log.info("%s/%s: %s %s: %s", swarm.namespace, swarm.name, kind.kind, action.name, error)
        except RejectedError as error:  # one object that a policy keeps delays nothing else
            self._metrics.rejected.labels(kind.plural).inc()
            name = f"{kind.kind} {swarm.namespace}/{action.name}"
            log.warning("%s cannot be deleted: %s", name, error)
            return
        self._enqueue(self._cache.forget(kind, action.uid))


def _steps(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Yield consecutive actions of one type that may overlap together, all others one by one."""
    for kind, run in itertools.groupby(actions, key=type):
        if kind in _CONCURRENT:
            yield list(run)
        else:
            yield from ([action] for action in run)


def _is_same_pod(pod: Json, manifest: Json, swarm: SwarmView) -> bool:
    have, want = pod["metadata"].get("labels") or {}, manifest["metadata"].get("labels") or {}
    return controller_uid(pod) == swarm.uid and have.get(names.INCARNATION) == want.get(
        names.INCARNATION
    )


def _is_deleted_at_once(pod: Json) -> bool:
    """Return True for a pod that never started or has no grace period: only its DELETED event follows."""
    meta = pod["metadata"]
    return not meta.get("finalizers") and not meta.get("deletionGracePeriodSeconds")


def _role(labels: object) -> str:
    role = labels.get(names.ROLE) if isinstance(labels, dict) else None
    return role if role in (names.SERVER, names.INSPECT) else "other"
