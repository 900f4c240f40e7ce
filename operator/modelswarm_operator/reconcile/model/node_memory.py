"""Memory of the accelerators of each pool, from the labels of the nodes that match it.

Used when a plan is made, not later: a stored plan does not change with the nodes. Knows NVIDIA's label only; for other
devices the document states the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelswarm.placement.budgets import NODE_LABEL
from modelswarm.resources.accelerators import accelerators_of
from modelswarm.resources.spec import Pool
from modelswarm_operator.reconcile.state.observed import NodeView

_MIB = 1 << 20


def accelerator_memory(
    pools: tuple[Pool, ...],
    nodes: Mapping[str, NodeView] | None,
    cluster_template: Mapping[str, Any],
) -> dict[str, int]:
    """Return the bytes of the smallest accelerator that a pod of each pool can get; pools without one are left out.

    A node matches by the nodeSelector of both pod templates; affinities are not read.
    """
    found: dict[str, int] = {}
    for pool in pools:
        selector = _node_selector(cluster_template) | _node_selector(pool.pod_template or {})
        names = accelerators_of(pool.resources.limits)
        sizes = [
            int(node.labels[NODE_LABEL]) * _MIB
            for node in (nodes or {}).values()
            if node.labels.get(NODE_LABEL, "").isdecimal()
            and selector.items() <= dict(node.labels).items()
            and all(node.allocatable.get(name, "0") != "0" for name in names)
        ]
        if sizes and names:
            found[pool.name] = min(sizes)
    return found


def _node_selector(template: Mapping[str, Any]) -> dict[str, Any]:
    spec = template.get("spec")
    selector = spec.get("nodeSelector") if isinstance(spec, dict) else None
    return dict(selector) if isinstance(selector, dict) else {}
