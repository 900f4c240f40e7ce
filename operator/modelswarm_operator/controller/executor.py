"""Carries out what a turn decided: the only writer.

Called by `tasks`, once per turn. Every write is safe to repeat and safe when it was decided on an old view: status with
the resourceVersion that was read, deletes with the uid, pods by POST under names that are never used twice. Answers go
into the cache at once, so that the next turn knows what this one did. Decides nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence

from modelswarm.kube.client import KubeClient
from modelswarm.kube.errors import ConflictError, NotFoundError, RejectedError
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
MAX_CONCURRENT_WRITES = 16  # writes of all swarms together
MAX_STATUS_TRIES = 5  # of a status write that others keep overtaking
_CONCURRENT = (CreatePod, DeletePod, LabelPod, ApplyChild, DeleteChild)  # runs of these may overlap
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
        """In order; raises the first error of the first step that failed, and nothing after it happens."""
        for together in _steps(actions):
            if len(together) == 1:
                await self._execute_one(swarm, together[0])
                continue
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

    def _update_cache(self, kind: Kind, raw: Json, *, gone: bool = False) -> None:
        self._enqueue(self._cache.apply_event(kind, gone, raw))

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
        raise ConflictError(409, "Conflict", "others write this swarm all the time")

    async def _version_if_unchanged(self, swarm: SwarmView) -> str:
        """Somebody wrote, but nothing that this turn looked at (labels, say): the decision stands."""
        raw = await self._client.get(SWARM.path(swarm.namespace, swarm.name))
        self._update_cache(SWARM, raw)
        now = swarm_view(raw)
        if dataclasses.replace(now, resource_version=swarm.resource_version) != swarm:
            raise ConflictError(409, "Conflict", "the swarm was changed while it was looked at")
        return now.resource_version

    async def _set_finalizer(self, swarm: SwarmView, present: bool) -> None:
        """On what the cache has now: a status write of this turn has raised the version."""
        stored = self._cache.swarms.get(swarm.uid)
        now = stored.view if stored is not None else swarm
        others = [name for name in now.finalizers if name != names.FINALIZER]
        wanted = [*others, names.FINALIZER] if present else others
        meta = {"uid": now.uid, "resourceVersion": now.resource_version, "finalizers": wanted}
        path = SWARM.path(swarm.namespace, swarm.name)
        answer = await self._client.patch(path, {"metadata": meta})
        self._update_cache(SWARM, answer, gone=now.is_deleting and not wanted)

    async def _create_pod(self, swarm: SwarmView, action: CreatePod) -> None:
        meta = action.manifest["metadata"]
        name = meta["name"]
        try:
            # Strict: a misspelt field of somebody's pod template would be without effect, and nobody would know.
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
        """The next turn finds it in `Observed.rejected`."""
        self._cache.record_rejection(swarm.uid, what, why)
        self._metrics.rejected.labels("pods" if "/" not in what else what.split("/")[0]).inc()
        log.warning("%s/%s: %s was refused: %s", swarm.namespace, swarm.name, what, why)

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
        self._metrics.deleted.labels(_role(known.labels if known is not None else {})).inc()
        log.info("%s/%s: deleted %s: %s", swarm.namespace, swarm.name, action.name, action.reason)
        if answer.get("kind") == POD.kind:
            self._update_cache(POD, answer, gone=_is_deleted_at_once(answer))

    async def _refresh_pod(self, path: str, uid: str) -> None:
        """The delete did not meet the pod that was meant, or met it while somebody else wrote."""
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
        except RejectedError as error:  # one pod's labels hold up nothing else
            name = f"{swarm.namespace}/{action.name}"
            log.warning("pod %s: its labels cannot be put right: %s", name, error)
        except NotFoundError:
            self._enqueue(self._cache.forget(POD, action.uid))
        except ConflictError:
            await self._refresh_pod(path, action.uid)

    async def _apply_child(self, swarm: SwarmView, manifest: Json) -> None:
        kind, name = CHILDREN[manifest["kind"]], manifest["metadata"]["name"]
        path = kind.path(swarm.namespace, name)
        what = f"{kind.kind}/{name}"
        known = self._cache.has_child(kind, swarm.uid, name)
        if not known and await self._is_name_taken(kind, name, swarm):
            self._record_rejection(swarm, what, f"a {kind.kind} {name} {NAME_TAKEN}")
            return
        try:
            self._update_cache(kind, await self._client.apply(path, manifest, FIELD_MANAGER))
        except RejectedError as error:
            self._record_rejection(swarm, what, str(error))
            return
        self._cache.clear_rejection(swarm.uid, what)

    async def _is_name_taken(self, kind: Kind, name: str, swarm: SwarmView) -> bool:
        """Whether somebody else's object has this name: apply would quietly take it over.

        What a swarm of this name left behind, the garbage collector has not come to yet: it goes now.
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
        self._enqueue(self._cache.forget(kind, action.uid))


def _steps(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Neighbours of one type that may overlap, and everything else by itself."""
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
    """Never started, or no grace: the answer is the pod's last state, and no more events but DELETED come."""
    meta = pod["metadata"]
    return not meta.get("finalizers") and not meta.get("deletionGracePeriodSeconds")


def _role(labels: object) -> str:
    role = labels.get(names.ROLE) if isinstance(labels, dict) else None
    return role if role in (names.SERVER, names.INSPECT) else "other"
