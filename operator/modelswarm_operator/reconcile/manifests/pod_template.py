"""Applies the pod patches of administrators (cluster-wide) and users (per pool), except for reserved fields.

Called when a pod is built, and once per turn to report the fields of a patch that have no effect. The fields that
identify a pod, and those for its network and its end, are the operator's: a patch of one is undone and reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from modelswarm.errors import UserError
from modelswarm.resources.accelerators import check_cluster_template, check_pool_template
from modelswarm.resources.labels import LINKS
from modelswarm.resources.spec import Pool, Spec
from modelswarm_operator.reconcile.manifests.strategic_merge import merge_pod
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import Json

CLUSTER_WIDE = "the operator's --pod-template"

_METADATA = ("name", "namespace", "generateName", "ownerReferences", "finalizers")
_SPEC = (
    "restartPolicy",
    "hostname",
    "subdomain",
    "terminationGracePeriodSeconds",
    "activeDeadlineSeconds",
)
_CONTAINER = ("command", "args", "terminationMessagePath", "terminationMessagePolicy")
_ENV = ("POD_IP", "NODE_ZONE")
_PORTS = (LINKS, "metrics")
_RESERVED_PREFIXES = (f"{names.DOMAIN}/", "app.kubernetes.io/")


def apply_patches(
    pod: Json, patches: Iterable[tuple[str, Mapping[str, Any]]]
) -> tuple[Json, list[str]]:
    """Return the pod with all patches applied, and the reserved fields that were restored, each as `where: field`."""
    ignored: list[str] = []
    result = pod
    for where, patch in patches:
        if patch:
            merged = merge_pod(result, patch, where)
            _check_shape(merged, where)
            ignored.extend(f"{where}: {field}" for field in _restore_reserved(merged, pod))
            result = merged
    return result, ignored


def _check_shape(pod: Json, where: str) -> None:
    """Raise UserError if a part that is read or restored here has another type after the patch."""
    for part in ("metadata", "spec"):
        if not isinstance(pod.get(part), dict):
            raise UserError(f"{where}.{part}", "must be an object and cannot be removed")
    for part in ("labels", "annotations"):
        if not isinstance(pod["metadata"].get(part) or {}, dict):
            raise UserError(f"{where}.metadata.{part}", "must be an object")
    containers = pod["spec"].get("containers")
    _check_objects(containers, f"{where}.spec.containers")
    for container in containers or ():
        for part in ("env", "ports"):
            _check_objects(container.get(part), f"{where}.spec.containers.{part}")


def _check_objects(value: Any, where: str) -> None:
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(where, "must be a list of objects")


def patches_of(spec: Spec, pool: Pool, cluster_wide: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the patches over the pool's pods, each with its name. Raises UserError for devices that stay idle."""
    index = next((i for i, known in enumerate(spec.pools) if known.name == pool.name), 0)
    where = f"spec.pools[{index}].podTemplate"
    check_cluster_template(cluster_wide, CLUSTER_WIDE)
    check_pool_template(pool, where)
    return [(CLUSTER_WIDE, cluster_wide), (where, pool.pod_template or {})]


def _restore_reserved(merged: Json, pod: Json) -> list[str]:
    """Restore the reserved fields of `merged` (a copy) from `pod`; return their names."""
    fields: list[str] = []
    merged["metadata"], merged["spec"] = dict(merged["metadata"]), dict(merged["spec"])
    for part, keys in (("metadata", _METADATA), ("spec", _SPEC)):
        fields += [f"{part}.{key}" for key in _restore(merged[part], pod[part], keys)]
    for part in ("labels", "annotations"):
        mine, theirs = pod["metadata"].get(part, {}), dict(merged["metadata"].get(part) or {})
        both = [
            *mine,
            *(key for key in theirs if key.startswith(_RESERVED_PREFIXES) and key not in mine),
        ]
        fields += [f"metadata.{part}[{key}]" for key in _restore(theirs, mine, both)]
        merged["metadata"][part] = theirs
    for key in ("apiVersion", "kind"):
        merged[key] = pod[key]
    return fields + _restore_container(merged["spec"], pod["spec"])


def _restore_container(spec: Json, ours: Json) -> list[str]:
    original = ours["containers"][0]
    containers = [dict(one) for one in spec.get("containers") or []]
    found = next((one for one in containers if one.get("name") == names.CONTAINER), None)
    if found is None:
        spec["containers"] = [original, *containers]
        return [f"spec.containers[{names.CONTAINER}]"]
    # The server stays first: the operator reads the state of this container.
    spec["containers"] = [found, *(one for one in containers if one is not found)]
    prefix = f"spec.containers[{names.CONTAINER}]"
    fields = [f"{prefix}.{key}" for key in _restore(found, original, _CONTAINER)]
    for part, keys in (("env", _ENV), ("ports", _PORTS)):
        changed = _restore_named(found, original, part, keys)
        fields += [f"{prefix}.{part}[{key}]" for key in changed]
    return fields


def _restore(target: Json, source: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    changed = [key for key in keys if target.get(key) != source.get(key)]
    for key in changed:
        if key in source:
            target[key] = source[key]
        else:
            del target[key]
    return changed


def _restore_named(target: Json, source: Json, part: str, keys: Iterable[str]) -> list[str]:
    mine = {item["name"]: item for item in source.get(part, []) if item["name"] in keys}
    theirs = list(target.get(part) or [])
    changed = [
        name
        for name, item in mine.items()
        if [i for i in theirs if i.get("name") == name] != [item]
    ]
    if changed:
        ours = [mine[name] for name in changed]
        target[part] = [
            *ours,
            *(item for item in theirs if not any(map(_same_name_or_port(item), ours))),
        ]
    return changed


def _same_name_or_port(item: Json) -> Callable[[Json], bool]:
    """Return a test for entries with the same name or port."""
    return lambda other: any(
        key in item and item[key] == other.get(key) for key in ("name", "containerPort")
    )
