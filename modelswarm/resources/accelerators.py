"""Accelerators that the pods of a pool get: extended resources of their limits, and claims of their pod template.

A resource whose name has a slash may also be a network card or a fuse device, so accelerators are known by name. Pod
templates that ask for others for the server are refused: such a device would be reserved and idle. Used by rules of
documents, by the plan and by the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from modelswarm.errors import UserError
from modelswarm.resources.labels import CONTAINER

if TYPE_CHECKING:
    from modelswarm.resources.spec import Pool

MARKS = ("/gpu", "/mig-", "/i915", "/xe", "/gaudi", "/npu", "/neuron")
"""Parts of the names of accelerators, such as `nvidia.com/gpu`, `nvidia.com/mig-1g.10gb` or `gpu.intel.com/xe`."""
CAPABILITY_LABEL = "nvidia.com/gpu.compute.major"
"""Label of nodes with the major CUDA capability of their GPUs, as GPU feature discovery writes it."""
ANY_KIND = "accelerator"
"""Kind of a device that only a resource claim names."""

_PLACE = "spec.pools[].resources.limits, at most one in a pool"
"""Place in a document at which it asks for accelerators."""
_KINDS = {"nvidia.com": "cuda", "amd.com": "cuda", "gpu.intel.com": "xpu"}
"""Torch's type of device by the vendor's domain; that of ROCm is `cuda`."""


def accelerators_of(resources: Iterable[str]) -> list[str]:
    """Return the names of accelerators among the names of resources."""
    return [name for name in resources if any(mark in str(name) for mark in MARKS)]


def claims_devices(pod_template: Mapping[str, Any] | None) -> bool:
    """Return True if a pod template claims devices (dynamic resource allocation)."""
    return bool(_part(_part(pod_template, "spec"), "resourceClaims"))


def check_pool_template(pool: Pool, where: str) -> None:
    """Raise UserError if the pool's pod template, at `where`, asks for accelerators other than those of the pool."""
    _check_server(pool.pod_template, pool.resources.limits, where)


def check_cluster_template(template: Mapping[str, Any], where: str) -> None:
    """Raise UserError if the template of all pods, at `where`, asks for a device: each pool asks for its own."""
    _check_server(template, {}, where)
    if claims_devices(template):
        raise UserError(
            f"{where}.spec.resourceClaims",
            "no pool would know of the device; allowed: one accelerator in resources.limits of a pool, or a claim "
            "in its podTemplate",
        )


def _check_server(template: Any, limits: Mapping[str, Any], where: str) -> None:
    """Check the resources of the container `server`. Other containers may use devices of their own."""
    containers = _part(_part(template, "spec"), "containers")
    for container in containers if isinstance(containers, list) else ():
        if _part(container, "name") != CONTAINER or _part(container, "$patch") == "delete":
            continue
        for part in ("limits", "requests"):
            asked = _part(_part(container, "resources"), part)
            for name in accelerators_of(asked if isinstance(asked, Mapping) else ()):
                amount = str(asked[name])
                if amount not in ("None", "0", str(limits.get(name))):
                    raise UserError(
                        f"{where}.spec.containers[{CONTAINER}].resources.{part}",
                        f"{amount} {name} would be reserved and idle; allowed: accelerators in {_PLACE}",
                    )


def without_devices(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod's spec without accelerators of the container `server`, and without claims that only it uses."""
    containers = [_without_devices(one) for one in body["containers"]]
    used = [
        _part(claim, "name")
        for one in (*containers, *_items(body.get("initContainers")))
        for claim in _items(_part(_part(one, "resources"), "claims"))
    ]
    claims = [one for one in _items(body.get("resourceClaims")) if _part(one, "name") in used]
    rest = {key: value for key, value in body.items() if key != "resourceClaims"}
    return {**rest, "containers": containers, **({"resourceClaims": claims} if claims else {})}


def _without_devices(container: Mapping[str, Any]) -> dict[str, Any]:
    resources = container.get("resources")
    if container.get("name") != CONTAINER or not isinstance(resources, Mapping):
        return dict(container)
    amounts = {
        part: {name: given[name] for name in given if not accelerators_of([name])}
        for part, given in resources.items()
        if isinstance(given, Mapping)
    }
    others = {part: given for part, given in resources.items() if part != "claims"}
    return {**container, "resources": {**others, **amounts}}


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _part(value: Any, key: str) -> Any:
    """Return a field of an unchecked part of a template; None if it has none."""
    return value.get(key) if isinstance(value, Mapping) else None


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
