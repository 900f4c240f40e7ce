"""Strategic merge patch over a Pod, as `kubectl patch` does it: lists of named things are merged by their names.

Called by `pod_template`. Knows the merge keys of the Pod type (the `x-kubernetes-patch-*` of its OpenAPI schema). Knows
the directives `$patch: replace | delete | merge`, `$retainKeys` and `$deleteFromPrimitiveList/…`; a null deletes. Knows
nothing of swarms. Neither argument is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelswarm.errors import UserError

_CONTAINER = {
    "ports": "containerPort",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
}
MERGE_KEYS: Mapping[str, Mapping[str, str]] = {
    "metadata": {"ownerReferences": "uid"},
    "spec": {
        "containers": "name",
        "initContainers": "name",
        "ephemeralContainers": "name",
        "volumes": "name",
        "imagePullSecrets": "name",
        "hostAliases": "ip",
        "topologySpreadConstraints": "topologyKey",
        "resourceClaims": "name",
        "schedulingGates": "name",
    },
    "spec.containers": _CONTAINER,
    "spec.initContainers": _CONTAINER,
    "spec.ephemeralContainers": _CONTAINER,
}
"""Path of an object -> its lists that are merged, with their merge key. All other lists are replaced whole."""
_PRIMITIVE = frozenset({"metadata.finalizers"})  # lists of plain values that are merged as sets
_DIRECTIVE = "$patch"
_DELETE_VALUES = "$deleteFromPrimitiveList/"
_ORDER = "$setElementOrder/"  # added by kubectl for the order of a list, which has no meaning here
_RETAIN_KEYS = "$retainKeys"

Object = Mapping[str, Any]


def merge_pod(base: Object, patch: Object, where: str) -> dict[str, Any]:
    """Return `base` with `patch` applied. Errors name the patch `where`. Raises UserError if it fits no Pod."""
    merged: dict[str, Any] = _merge_object(base, patch, "", where)
    return merged


def _merge_object(base: Object, patch: Object, path: str, where: str) -> dict[str, Any]:
    directive = patch.get(_DIRECTIVE)
    if directive == "delete":
        return {}
    if directive == "replace":
        return dict(_strip_directives(patch))
    if directive not in (None, "merge"):
        raise UserError(
            where, f"$patch: {directive!r} is not allowed; allowed: merge, replace, delete"
        )
    merged = dict(_retain_keys(base, patch, where))
    for key, value in patch.items():
        if key in (_DIRECTIVE, _RETAIN_KEYS) or key.startswith(_ORDER):
            continue
        if key.startswith(_DELETE_VALUES):
            _delete_values(merged, key.removeprefix(_DELETE_VALUES), value, where)
        elif value is None:
            merged.pop(key, None)
        else:
            here = f"{path}.{key}" if path else key
            merged[key] = _merge_value(merged.get(key), value, path, key, here, where)
    return merged


def _merge_value(base: Any, value: Any, path: str, key: str, here: str, where: str) -> Any:
    if isinstance(base, dict) and isinstance(value, Mapping):
        return _merge_object(base, value, here, f"{where}.{key}")
    if isinstance(base, dict) or (isinstance(base, list) and not isinstance(value, list)):
        kind = "an object" if isinstance(base, dict) else "a list"
        raise UserError(f"{where}.{key}", f"must be {kind}")
    merge_key = MERGE_KEYS.get(path, {}).get(key)
    if merge_key is not None:
        return _merge_named_list(base or [], value, merge_key, here, f"{where}.{key}")
    if here in _PRIMITIVE and isinstance(value, list):
        return [*(base or []), *(item for item in value if item not in (base or []))]
    return _strip_directives(value)


def _merge_named_list(base: list[Any], patch: Any, key: str, path: str, where: str) -> list[Any]:
    if not isinstance(patch, list):
        raise UserError(where, "must be a list")
    if any(isinstance(item, Mapping) and item.get(_DIRECTIVE) == "replace" and key not in item
           for item in patch):  # fmt: skip
        return [_strip_directives(item) for item in patch
                if not isinstance(item, Mapping) or item.get(_DIRECTIVE) != "replace"]  # fmt: skip
    merged: list[dict[str, Any] | None] = [dict(item) for item in base]  # None: deleted
    places: dict[Any, list[int]] = {}  # by the merge key, since a patch may have 100,000 items
    for place, one in enumerate(base):
        if isinstance(one.get(key), str | int | float):
            places.setdefault(one[key], []).append(place)
    for index, item in enumerate(patch):
        at = f"{where}[{index}]"
        if not isinstance(item, Mapping) or key not in item:
            raise UserError(at, f"needs a {key}, the merge key of this list")
        if not isinstance(item[key], str | int):
            raise UserError(f"{at}.{key}", "must be a string or a number")
        found = places.get(item[key])
        if item.get(_DIRECTIVE) == "delete":
            for place in places.pop(item[key], ()):
                merged[place] = None
        elif found:
            merged[found[0]] = _merge_object(merged[found[0]] or {}, item, path, at)
        else:
            places[item[key]] = [len(merged)]
            merged.append(_merge_object({}, item, path, at))
    return [one for one in merged if one is not None]


def _retain_keys(base: Object, patch: Object, where: str) -> Object:
    keys = patch.get(_RETAIN_KEYS)
    if keys is None:
        return base
    if not isinstance(keys, list):
        raise UserError(where, "$retainKeys must be a list of names")
    retained = {key for key in keys if isinstance(key, str)}
    return {key: value for key, value in base.items() if key in retained}


def _delete_values(merged: dict[str, Any], key: str, values: Any, where: str) -> None:
    if not isinstance(values, list) or not all(
        isinstance(one, str | int | float) for one in values
    ):
        raise UserError(where, f"{_DELETE_VALUES}{key} must be a list of strings or numbers")
    if not isinstance(merged.get(key) or [], list):
        raise UserError(where, f"{_DELETE_VALUES}{key}: {key} is not a list")
    deleted = set(values)
    merged[key] = [
        item
        for item in merged.get(key) or []
        if not (isinstance(item, str | int | float) and item in deleted)
    ]


def _strip_directives(value: Any) -> Any:
    """Return a copy without directives and nulls: there is nothing that they could delete."""
    if isinstance(value, Mapping):
        return {
            key: _strip_directives(item)
            for key, item in value.items()
            if item is not None and not key.startswith("$")
        }
    if isinstance(value, list):
        return [_strip_directives(item) for item in value]
    return value
