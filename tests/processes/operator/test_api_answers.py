"""The operator's writer against an API server with scripted responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes.gateway.test_kube_client import connected

from modelswarm_operator.controller.executor import Executor
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.kube.events import EventRecorder
from modelswarm_operator.kube.resources import BUDGET, POD, SERVICE, Kind
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.reconcile.state.actions import ApplyChild, DeletePod
from modelswarm_operator.reconcile.state.observed import Json, SwarmView

SWARM = SwarmView("swarm-uid", "counting", "ns", 1, "1", {}, (), False, None, "")
OWNER = {"uid": SWARM.uid, "controller": True, "kind": "ModelSwarm", "name": SWARM.name}
BOTH = (422, {"kind": "Status", "message": "minAvailable and maxUnavailable cannot be both set"})
LINKS, ADDED = {"name": "links", "port": 7000}, {"name": "added", "port": 7002}


async def test_deleted_pod_without_a_version_leaves_the_cache(tmp_path: Path) -> None:
    """An API server that removes a pod at once may return the pod without its resourceVersion."""
    meta: dict[str, Any] = {"name": "p", "uid": "u", "namespace": "ns", "ownerReferences": [OWNER]}
    cache, woken = Cache(), set[str]()
    cache.apply_event(POD, False, {"metadata": {**meta, "resourceVersion": "7"}})
    assert cache.pods.get("u") is not None
    async with connected(tmp_path, (200, {"kind": "Pod", "metadata": meta})) as (client, server):
        executor = Executor(client, cache, EventRecorder(client, "me"), Metrics(), woken.update)
        await executor.execute(SWARM, [DeletePod("p", "u", "its container has exited")])
    assert [request["verb"] for request in server.requests] == ["DELETE"]
    assert cache.pods.get("u") is None
    assert woken == {SWARM.uid}


def child(kind: Kind, version: int, **spec: Any) -> Json:
    meta = {"name": "c", "namespace": "ns", "uid": "u", "ownerReferences": [OWNER]}
    return {"kind": kind.kind, "metadata": {**meta, "resourceVersion": str(version)}, "spec": spec}


@pytest.mark.parametrize(
    ("kind", "edited", "wanted", "first"),
    [
        (BUDGET, {"maxUnavailable": 1}, {"minAvailable": 2}, BOTH),
        (SERVICE, {"ports": [LINKS, ADDED]}, {"ports": [LINKS]}, None),
    ],
    ids=["budget", "service"],
)
async def test_edit_that_an_apply_would_keep_is_undone(
    tmp_path: Path, kind: Kind, edited: Json, wanted: Json, first: tuple[int, Json] | None
) -> None:
    """Fields and ports of another manager stay in a server-side apply."""
    cache, manifest = Cache(), child(kind, 1, **wanted)
    del manifest["metadata"]["resourceVersion"]
    cache.apply_event(kind, False, child(kind, 5, **edited))
    answers = [first or (200, child(kind, 6, **edited)), *([(200, child(kind, 7, **wanted))] * 2)]
    async with connected(tmp_path, *answers) as (client, server):
        executor = Executor(client, cache, EventRecorder(client, "me"), Metrics(), lambda _: None)
        await executor.execute(SWARM, [ApplyChild(manifest)])
    assert [request["verb"] for request in server.requests] == ["PATCH"] * 3
    merged = server.requests[1]["body"]["spec"]
    assert merged == {"maxUnavailable": None, **wanted}
    observed = cache.budgets if kind is BUDGET else cache.services
    assert [each["spec"] for each in observed.all()] == [wanted]
