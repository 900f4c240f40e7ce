"""Accelerators that the pods of a pool get: extended resources of their limits, and claims of their pod template.

A resource whose name has a slash may also be a network card or a fuse device, so accelerators are known by name. Used
by rules of documents, by the plan and by the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelswarm.resources.spec import Pool

MARKS = ("/gpu", "/mig-", "/i915", "/xe", "/gaudi", "/npu", "/neuron")
"""Parts of the names of accelerators, such as `nvidia.com/gpu`, `nvidia.com/mig-1g.10gb` or `gpu.intel.com/xe`."""
ANY_KIND = "accelerator"
"""Kind of a device that only a resource claim names."""

_KINDS = {"nvidia.com": "cuda", "amd.com": "cuda", "gpu.intel.com": "xpu"}
"""Torch's type of device by the vendor's domain; that of ROCm is `cuda`."""


def accelerators_of(resources: Iterable[str]) -> list[str]:
    """Return the names of accelerators among the names of resources."""
    return [name for name in resources if any(mark in name for mark in MARKS)]


def claims_devices(pod_template: Mapping[str, Any] | None) -> bool:
    """Return True if a pod template claims devices (dynamic resource allocation)."""
    spec = (pod_template or {}).get("spec")
    return isinstance(spec, dict) and bool(spec.get("resourceClaims"))


def has_accelerator(pool: Pool) -> bool:
    return bool(describe_device(pool))


def describe_device(pool: Pool) -> str:
    """Return the name of the pool's device for messages; "" if it has none."""
    names = accelerators_of(pool.resources.limits)
    return names[0] if names else "a resource claim" if claims_devices(pool.pod_template) else ""


def memory_label(resource: str) -> str:
    """Return the label of nodes with the memory of each such accelerator in MiB, as GPU feature discovery writes it.

    A node with slices has `nvidia.com/mig-1g.10gb.memory` beside `nvidia.com/gpu.memory`.
    """
    return f"{resource}.memory"


def device_kind(pool: Pool) -> str:
    """Return the device that a server of the pool must find: `cpu`, `cuda`, `xpu`, or an accelerator of any kind."""
    if not has_accelerator(pool):
        return "cpu"
    return _KINDS.get(describe_device(pool).partition("/")[0], ANY_KIND)
