"""Memory and capability of the accelerators of each pool, from the labels of the nodes that match it.

Used when a plan is made, not later: a stored plan does not change with the nodes. Knows NVIDIA's labels only; for other
devices, and for claimed ones, the document states memory and dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from modelswarm.resources.accelerators import CAPABILITY_LABEL, accelerators_of, memory_label
from modelswarm.resources.spec import Pool
from modelswarm_operator.reconcile.manifests.strategic_merge import merge_pod
from modelswarm_operator.reconcile.state.observed import NodeView

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class NodeAccelerators:
    """Facts about the accelerators of a swarm, as far as labels of nodes tell them."""

    memory: Mapping[str, int]  # bytes of the smallest, by pool; pools without a label are left out
    capability: int | None = None  # lowest major CUDA capability of all pools; None: not known


NO_ACCELERATORS = NodeAccelerators({})


def find_accelerators(
    pools: tuple[Pool, ...],
    nodes: Mapping[str, NodeView] | None,
    cluster_template: Mapping[str, Any],
) -> NodeAccelerators:
    """Return what the labels of the nodes tell that a pod of any of the pools can get.

    A node matches by the nodeSelector of both pod templates; affinities are not read.
    """
    memory: dict[str, int] = {}
    capabilities: list[int] = []
    for index, pool in enumerate(pools):
        selector = _node_selector(cluster_template, pool, f"spec.pools[{index}].podTemplate")
        for resource in accelerators_of(pool.resources.limits):  # one at most
            matching = [
                node.labels
                for node in (nodes or {}).values()
                if selector.items() <= dict(node.labels).items()
                and node.allocatable.get(resource, "0") != "0"
            ]
            if sizes := list(_numbers(matching, memory_label(resource))):
                memory[pool.name] = min(sizes) * _MIB
            capabilities += _numbers(matching, CAPABILITY_LABEL)
    return NodeAccelerators(memory, min(capabilities, default=None))


def _numbers(matching: list[Mapping[str, str]], label: str) -> Iterator[int]:
    """Yield the numbers of the label; a device whose driver does not tell its memory has 0."""
    found = (labels.get(label, "") for labels in matching)
    return (number for text in found if text.isdecimal() and (number := int(text)) > 0)


def _node_selector(cluster_template: Mapping[str, Any], pool: Pool, where: str) -> dict[str, Any]:
    """Return the nodeSelector of the pool's pods. The pool's patch may remove labels of the other one."""
    merged = merge_pod(merge_pod({}, cluster_template, where), pool.pod_template or {}, where)
    spec = merged.get("spec")
    selector = spec.get("nodeSelector") if isinstance(spec, dict) else None
    return dict(selector) if isinstance(selector, dict) else {}
