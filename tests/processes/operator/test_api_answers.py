"""The operator's writer against an API server with scripted responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from processes.gateway.test_kube_client import connected

from modelswarm_operator.controller.executor import Executor
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.kube.events import EventRecorder
from modelswarm_operator.kube.resources import POD
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.reconcile.state.actions import DeletePod
from modelswarm_operator.reconcile.state.observed import SwarmView

SWARM = SwarmView("swarm-uid", "counting", "ns", 1, "1", {}, (), False, None, "")


async def test_deleted_pod_without_a_version_leaves_the_cache(tmp_path: Path) -> None:
    """An API server that removes a pod at once may return the pod without its resourceVersion."""
    owner = {"uid": SWARM.uid, "controller": True, "kind": "ModelSwarm", "name": SWARM.name}
    meta: dict[str, Any] = {"name": "p", "uid": "u", "namespace": "ns", "ownerReferences": [owner]}
    cache, woken = Cache(), set[str]()
    cache.apply_event(POD, False, {"metadata": {**meta, "resourceVersion": "7"}})
    assert cache.pods.get("u") is not None
    async with connected(tmp_path, (200, {"kind": "Pod", "metadata": meta})) as (client, server):
        executor = Executor(client, cache, EventRecorder(client, "me"), Metrics(), woken.update)
        await executor.execute(SWARM, [DeletePod("p", "u", "its container has exited")])
    assert [request["verb"] for request in server.requests] == ["DELETE"]
    assert cache.pods.get("u") is None
    assert woken == {SWARM.uid}
