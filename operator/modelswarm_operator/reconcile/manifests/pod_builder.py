"""Builds the pod of a slot: chooses its pool and applies the pool's patch.

Called by `slot_filler` when a pod is due. Pools alternate: a new pod goes to a pool where no pod of the swarm waits for
a node. Of several, the pool with the fewest pods of the span is chosen. A slot whose pod found no node goes on to the
next pool, so that each gets its turn. Decides nothing about slots.
"""

from __future__ import annotations

from collections import Counter

from modelswarm.resources.spec import Pool, Spec
from modelswarm_operator.reconcile.manifests.manifests import ManifestBuilder, server_pod
from modelswarm_operator.reconcile.manifests.pod_template import apply_patches, patches_of
from modelswarm_operator.reconcile.model.span_plan import Layout
from modelswarm_operator.reconcile.pods.inventory import PodInventory
from modelswarm_operator.reconcile.state.names import SlotKey
from modelswarm_operator.reconcile.state.observed import Json


class PodBuilder:
    def __init__(
        self, builder: ManifestBuilder, spec: Spec, layout: Layout, inventory: PodInventory
    ) -> None:
        self._builder, self._spec, self._layout = builder, spec, layout
        self._used: Counter[tuple[int, str]] = Counter(
            (server.slot.span, server.pool) for server in inventory.servers if server.is_alive
        )
        waiting = [one for one in inventory.servers if one.is_alive and one.pod.unschedulable]
        self._full = {server.pool for server in waiting}
        self._tried = {server.slot: server.pool for server in waiting}

    def __call__(self, slot: SlotKey, incarnation: int) -> Json:
        pool = self._pool(slot)
        self._used[slot.span, pool.name] += 1
        pod = server_pod(self._builder, self._spec, self._layout, slot, pool, incarnation)
        patches = patches_of(self._spec, pool, self._builder.policy.pod_template)
        pod = apply_patches(pod, patches)[0]
        for rule in pod["spec"].get("topologySpreadConstraints") or ():
            if isinstance(rule, dict):  # without a selector it would match no pod
                rule.setdefault("labelSelector", {"matchLabels": self._builder.selector(slot.span)})
        return pod

    def _pool(self, slot: SlotKey) -> Pool:
        pools = self._layout.pools
        tried = [index for index, pool in enumerate(pools) if pool.name == self._tried.get(slot)]
        turn = (tried[0] + 1 if tried else slot.span + slot.ordinal) % len(pools)
        order = [*pools[turn:], *pools[:turn]]
        if tried:
            return next((pool for pool in order if pool.name not in self._full), order[0])
        return min(
            order, key=lambda pool: (pool.name in self._full, self._used[slot.span, pool.name])
        )


def reserved_fields(builder: ManifestBuilder, spec: Spec, layout: Layout) -> list[str]:
    """Return the fields of the pools' patches that have no effect, found by applying them to a sample pod.

    Raises UserError if a patch fits no pod at all.
    """
    ignored: list[str] = []
    for pool in layout.pools:
        patches = patches_of(spec, pool, builder.policy.pod_template)
        if any(patch for _, patch in patches):
            pod = server_pod(builder, spec, layout, SlotKey(0, 0), pool, 1)
            ignored += apply_patches(pod, patches)[1]
    return list(dict.fromkeys(ignored))
