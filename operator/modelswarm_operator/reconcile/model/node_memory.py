"""Memory of the accelerators of each pool, from the labels of the nodes that match it.

Used when a plan is made, not later: a stored plan does not change with the nodes. Knows NVIDIA's labels only; for other
devices, and for claimed ones, the document states the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelswarm.resources.accelerators import accelerators_of, memory_label
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
        for resource in accelerators_of(pool.resources.limits):  # one at most
            label = memory_label(resource)
            sizes = [
                int(node.labels[label]) * _MIB
                for node in (nodes or {}).values()
                if node.labels.get(label, "").isdecimal()
                and selector.items() <= dict(node.labels).items()
                and node.allocatable.get(resource, "0") != "0"
            ]
            if sizes:
                found[pool.name] = min(sizes)
    return found


def _node_selector(template: Mapping[str, Any]) -> dict[str, Any]:
    spec = template.get("spec")
    selector = spec.get("nodeSelector") if isinstance(spec, dict) else None
    return dict(selector) if isinstance(selector, dict) else {}
