"""Checks the JSON schema of a tool's arguments, and refuses one that no arguments could follow.

The grammar's library checks a schema as a whole where it constrains an answer. These checks are for every tool, since
models and parsers read the schema too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelswarm_gateway.errors import invalid_request

MAX_DEPTH = 64
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_LIMITS = (
    ("minimum", "maximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "$defs", "definitions", "patternProperties")
_SCHEMAS = ("items", "additionalProperties", "not")


def check_parameters(path: str, schema: object) -> None:
    """Raise ApiError unless `schema` is the schema of an object."""
    if not isinstance(schema, Mapping):
        raise invalid_request(path, f"{path}: must be a JSON schema, which is an object")
    if schema.get("type", "object") != "object":
        path = f"{path}.type"
        raise invalid_request(path, f'{path}: must be "object", because arguments have names')
    _check(path, schema, 0)


def _check(path: str, schema: object, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise invalid_request(path, f"{path}: must be a JSON schema: an object, true or false")
    if depth > MAX_DEPTH:
        raise invalid_request(path, f"{path}: schemas may be nested {MAX_DEPTH} deep")
    _check_types(path, schema)
    _check_limits(path, schema)
    _check_required(path, schema)
    for name in _LISTS:
        for place, part in enumerate(_part(path, schema, name, list)):
            _check(f"{path}.{name}[{place}]", part, depth + 1)
    for name in _MAPS:
        for key, part in _part(path, schema, name, Mapping).items():
            _check(f"{path}.{name}.{key}", part, depth + 1)
    for name in _SCHEMAS:
        if name in schema and not isinstance(schema[name], list):  # a list of items: old drafts
            _check(f"{path}.{name}", schema[name], depth + 1)


def _part(path: str, schema: Mapping[str, Any], name: str, kind: Any) -> Any:
    value = schema.get(name)
    if name not in schema:
        return kind() if kind is list else {}
    if not isinstance(value, kind):
        words = "a list" if kind is list else "an object"
        raise invalid_request(f"{path}.{name}", f"{path}.{name}: must be {words}")
    return value


def _check_types(path: str, schema: Mapping[str, Any]) -> None:
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            detail = f"must be one of {', '.join(_TYPES)}, or a list of them"
            raise invalid_request(f"{path}.type", f"{path}.type: {detail}")
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        raise invalid_request(f"{path}.enum", f"{path}.enum: must be a list, not empty")


def _check_limits(path: str, schema: Mapping[str, Any]) -> None:
    for low, high in _LIMITS:
        least, most = schema.get(low), schema.get(high)
        for name, value in ((low, least), (high, most)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name in schema and not is_number:
                raise invalid_request(f"{path}.{name}", f"{path}.{name}: must be a number")
        if least is not None and most is not None and least > most:
            detail = f"{low} is {least} and {high} is {most}: no value fits"
            raise invalid_request(f"{path}.{low}", f"{path}.{low}: {detail}")


def _check_required(path: str, schema: Mapping[str, Any]) -> None:
    names = _part(path, schema, "required", list)
    if not all(isinstance(name, str) for name in names):
        raise invalid_request(f"{path}.required", f"{path}.required: must be a list of names")
    declared = _part(path, schema, "properties", Mapping)
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        for name in names:
            if name not in declared:
                detail = (
                    f"{name[:64]!r} is required, is no property, and other properties are forbidden"
                )
                raise invalid_request(f"{path}.required", f"{path}.required: {detail}")
