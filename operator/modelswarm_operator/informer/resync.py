"""Lists all objects, so that no decision depends on having seen every event.

Called by `manager` before the first turn and then at intervals. `worker` lists one swarm before it deletes anything and
after a write with an unknown outcome. Fills the cache, returns the changed swarms; decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from modelswarm.kube.client import KubeClient
from modelswarm.kube.errors import KubeError, NotFoundError, RejectedError
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.kube.resources import BUDGET, NODE, POD, SERVICE, SWARM, Kind
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import SwarmView


class Resync:
    def __init__(
        self, client: KubeClient, cache: Cache, metrics: Metrics, namespaces: Sequence[str]
    ) -> None:
        self._client = client
        self._cache = cache
        self._metrics = metrics
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self.last_attempt = time.monotonic()  # read by the liveness probe
        self._changed: set[str] = set()  # swarms changed by a round of lists that is not complete
        self.is_synced = False
        self.is_forbidden = False  # the last attempt was rejected: a permission is missing
        self.problem = "the first list is not complete"

    async def resync_all(self) -> set[str]:
        """List every kind (in each namespace) for all swarms; return the changed swarms. Raises KubeError."""
        self.last_attempt = time.monotonic()
        try:
            for kind in (SWARM, POD, SERVICE, BUDGET):
                self._changed |= await self._list(kind)
            self._changed |= await self._list_nodes()
        except KubeError as error:
            self.problem, self.is_forbidden = (
                _describe_error(error),
                isinstance(error, RejectedError),
            )
            self._metrics.resyncs.labels("failed").inc()
            raise
        self.is_synced, self.is_forbidden, self.problem = True, False, ""
        self._metrics.resyncs.labels("done").inc()
        self._metrics.last_resync.set_to_current_time()
        changed, self._changed = self._changed, set()
        return changed

    async def _list(self, kind: Kind) -> set[str]:
        query = {"labelSelector": kind.selector} if kind.selector else {}
        items, versions = [], []
        for namespace in self._namespaces:
            found, version = await self._client.list_all(kind.path(namespace), query)
            items += found
            versions.append(int(version))
        return self._cache.replace(kind, items, min(versions))

    async def _list_nodes(self) -> set[str]:
        """List nodes. An install for some namespaces may not read them; all that needs nodes is left out then."""
        try:
            items, version = await self._client.list_all(NODE.path(), {})
        except RejectedError:
            had_sight, self._cache.can_read_nodes = self._cache.can_read_nodes, False
            return self._cache.uids() if had_sight else set()
        self._cache.can_read_nodes = True
        return self._cache.replace(NODE, items, int(version))

    async def resync_swarm(self, swarm: SwarmView) -> set[str]:
        """List a swarm and its pods, and the nodes if one of them seems to be lost for good. Raises KubeError."""
        try:
            raw = await self._client.get(SWARM.path(swarm.namespace, swarm.name))
        except NotFoundError:
            return self._cache.forget(SWARM, swarm.uid)
        if raw["metadata"]["uid"] != swarm.uid:
            affected = self._cache.forget(SWARM, swarm.uid)
            return affected | self._cache.apply_event(SWARM, False, raw)
        changed = self._cache.apply_event(SWARM, False, raw)
        query = {"labelSelector": f"{names.SWARM_UID}={swarm.uid}"}
        pods, version = await self._client.list_all(POD.path(swarm.namespace), query)
        changed |= self._cache.replace(POD, pods, int(version), owner=swarm.uid)
        # Pods of such a node are deleted by force: an event of a node that was missed must not cause that.
        if not self._cache.can_read_nodes or self._cache.has_usable_nodes_of(swarm):
            return changed
        return changed | await self._list_nodes()


def _describe_error(error: KubeError) -> str:
    if isinstance(error, NotFoundError):
        return f"the CustomResourceDefinition {SWARM.plural}.{SWARM.group} is not installed"
    return str(error)
