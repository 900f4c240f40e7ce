"""Limits of a JSON schema that hold before any library reads it, and the keywords that strict schemas may have.

Pure; called on the event loop, so it takes time proportional to the schema and never recurses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from modelswarm_gateway.generation.grammar.source import MAX_SOURCE_BYTES

MAX_DEPTH = 64
"""Lists and objects inside each other; llguidance's reader stops at 128."""
_MAX_EXACT = 1 << 53  # up to here a double is exact for each whole number
_ANNOTATIONS = {
    *("$schema", "$id", "$comment", "title", "description", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly", "discriminator"),
}
_SCHEMA = {"items", "additionalItems", "additionalProperties", "contains", "not", "propertyNames"}
_SCHEMA_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}
_SCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {
    *("type", "enum", "const", "$ref", "$anchor", "required", "format", "pattern", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength"),
    *("minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties"),
    *("if", "then", "else", "dependentRequired", "unevaluatedProperties", "unevaluatedItems"),
}
KNOWN_KEYWORDS = frozenset(_ANNOTATIONS | _SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS | _VALUES)


class SchemaError(ValueError):
    """The schema is refused; the text says why and what is allowed."""


def dump_schema(schema: object, *, strict: bool) -> str:
    """Return the schema as JSON text. Raise SchemaError if it is too deep or large, or strict with unknown keywords."""
    if not isinstance(schema, dict):
        raise SchemaError("the schema must be a JSON object")
    if _is_deeper(schema, MAX_DEPTH):
        raise SchemaError(f"the schema is nested more than {MAX_DEPTH} levels deep")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise SchemaError("the schema has a number that is infinite or NaN") from error
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise SchemaError(f"the schema has {size} bytes; allowed: {MAX_SOURCE_BYTES}")
    for part in subschemas(schema):
        for keyword in ("const", "enum"):
            _check_whole_numbers(keyword, part.get(keyword))
        if strict:
            for keyword in part.keys() - KNOWN_KEYWORDS:
                detail = "leave it out, or send strict: false to have it ignored"
                raise SchemaError(f"{keyword!r} is not a keyword of a strict schema; {detail}")
    return text


def _check_whole_numbers(keyword: str, value: object) -> None:
    """Raise SchemaError for a whole number that llguidance would replace by its neighbour among doubles."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict | list):
            waiting += part.values() if isinstance(part, dict) else part
        elif isinstance(part, int) and abs(part) > _MAX_EXACT:
            detail = "is beyond 2^53, where not every whole number is exact; make it a string"
            raise SchemaError(f"{keyword}: {str(part)[:40]} {detail}")


def _is_deeper(value: object, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schema and all schemas inside it."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for keyword, value in part.items():
            if keyword in _SCHEMA_MAPS and isinstance(value, dict):
                waiting += value.values()
            elif keyword in _SCHEMA_LISTS and isinstance(value, list):
                waiting += value
            elif keyword in _SCHEMA:
                waiting.append(value)
