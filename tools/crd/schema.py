"""Converts a pydantic type to the structural schema that Kubernetes requires.

Kubernetes accepts a part of JSON schema: no references, no unions, one type per field, defaults that fit. Anything
that cannot be expressed raises SchemaError, so that no new field is dropped silently. Used by `make_crd.py`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

VALIDATIONS = "x-kubernetes-validations"
_KEPT_KEYWORDS = (
    *("type", "nullable", "format", "description", "enum", "pattern", "required"),
    *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
)
_DROPPED_KEYWORDS = {
    "title",
    "$defs",
    "default",
    "properties",
    "items",
    "additionalProperties",
    "prefixItems",
}


class SchemaError(Exception):
    """The type contains something that a structural schema cannot express."""


def structural_schema(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """Return the structural schema of a type. `defaults`: the API server fills in absent fields."""
    whole = model.model_json_schema(by_alias=True)
    return _Converter(whole.get("$defs", {}), defaults).convert(whole, model.__name__)


class _Converter:
    def __init__(self, definitions: dict[str, Schema], defaults: bool) -> None:
        self._definitions, self._defaults = definitions, defaults

    def convert(self, raw: Schema, path: str) -> Schema:
        raw = self._inline_references(raw, path)
        if _is_int_or_string(raw):
            return _order_keywords({"x-kubernetes-int-or-string": True, **_merge_union(raw)})
        self._refuse_unknown(raw, path)
        schema = {key: raw[key] for key in _KEPT_KEYWORDS if key in raw}
        schema |= {key: value for key, value in raw.items() if key.startswith("x-kubernetes-")}
        if "const" in raw:
            schema["enum"] = [raw["const"]]
        self._convert_limits(raw, schema)
        self._convert_children(raw, schema, path)
        default = raw.get("default")
        if isinstance(
            default, dict
        ):  # what its fields get by default, they get from their own defaults
            default = {} if has_defaults(schema) else None
        if self._defaults and default not in (None, []):
            schema["default"] = default
        return _order_keywords(schema)

    def _inline_references(self, raw: Schema, path: str) -> Schema:
        """Return the schema without `$ref` and without the null of an optional field.

        Keywords beside a `$ref` win over those of its target; rules are concatenated.
        """
        options = [option for option in raw.get("anyOf", ()) if option.get("type") != "null"]
        if len(options) == 1:
            raw = _merge_schemas(options[0], {k: v for k, v in raw.items() if k != "anyOf"})
            return self._inline_references(raw, path)
        if "$ref" in raw:
            target = self._definitions[raw["$ref"].rsplit("/", 1)[1]]
            raw = _merge_schemas(target, {k: v for k, v in raw.items() if k != "$ref"})
            return self._inline_references(raw, path)
        if options and not _is_int_or_string(raw):
            raise SchemaError(f"{path}: a union is not structural")
        return raw

    def _convert_children(self, raw: Schema, schema: Schema, path: str) -> None:
        if "properties" in raw:
            schema["properties"] = {
                name: self.convert(child, f"{path}.{name}")
                for name, child in raw["properties"].items()
            }
        if "items" in raw:
            schema["items"] = self.convert(raw["items"], f"{path}[]")
        further = raw.get("additionalProperties")
        if not isinstance(further, dict):
            return
        further = self._inline_references(further, f"{path}.*")
        if further:
            schema["additionalProperties"] = self.convert(further, f"{path}.*")
        elif "properties" not in raw:  # any JSON; with fields declared, only those are kept
            schema["x-kubernetes-preserve-unknown-fields"] = True

    def _convert_limits(self, raw: Schema, schema: Schema) -> None:
        """Convert exclusive limits, which only whole numbers have here."""
        if "exclusiveMinimum" in raw:
            schema["minimum"] = int(raw["exclusiveMinimum"]) + 1
        if "exclusiveMaximum" in raw:
            schema["maximum"] = int(raw["exclusiveMaximum"]) - 1

    def _refuse_unknown(self, raw: Schema, path: str) -> None:
        known = {
            *_KEPT_KEYWORDS,
            *_DROPPED_KEYWORDS,
            "const",
            "exclusiveMinimum",
            "exclusiveMaximum",
        }
        strange = [key for key in raw if key not in known and not key.startswith("x-kubernetes-")]
        if strange:
            raise SchemaError(
                f"{path}: {', '.join(strange)} cannot be expressed in a structural schema"
            )
        if "type" not in raw and "x-kubernetes-preserve-unknown-fields" not in raw:
            raise SchemaError(f"{path}: has no type")


def has_defaults(schema: Schema) -> bool:
    """Return True if an empty object gets a field by default."""
    return any("default" in child for child in schema.get("properties", {}).values())


def fields_without_description(schema: Schema, path: str = "") -> list[str]:
    """Return the paths of fields without a description, at any depth."""
    found = []
    for name, child in schema.get("properties", {}).items():
        if len(child.get("description", "")) < 10:
            found.append(f"{path}.{name}")
        found += fields_without_description(child, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(schema.get(key), dict):
            found += fields_without_description(schema[key], path + mark)
    return found


def _is_int_or_string(raw: Schema) -> bool:
    return sorted(option.get("type", "") for option in raw.get("anyOf", ())) == [
        "integer",
        "string",
    ]


def _merge_union(raw: Schema) -> Schema:
    """Return the limits of both branches: lengths for text, limits for numbers."""
    limits = {
        key: value
        for option in raw["anyOf"]
        for key, value in option.items()
        if key in ("minimum", "maximum", "minLength", "maxLength")
    }
    kept = {k: v for k, v in raw.items() if k == "description" or k.startswith("x-kubernetes-")}
    return limits | kept


def _merge_schemas(inner: Schema, outer: Schema) -> Schema:
    rules = [*inner.get(VALIDATIONS, ()), *outer.get(VALIDATIONS, ())]
    return {**inner, **outer, **({VALIDATIONS: rules} if rules else {})}


def _order_keywords(schema: Schema) -> Schema:
    """Return the schema with the keywords that people read first."""
    first = [key for key in ("description", "type", "default") if key in schema]
    last = [key for key in ("properties", "items", "additionalProperties") if key in schema]
    middle = sorted(key for key in schema if key not in first and key not in last)
    ordered = {key: schema[key] for key in (*first, *middle, *last)}
    if VALIDATIONS in ordered:
        ordered[VALIDATIONS] = [_order_rule(rule) for rule in ordered[VALIDATIONS]]
    return ordered


def _order_rule(rule: Schema) -> Schema:
    return {key: rule[key] for key in ("rule", "message", "reason", "fieldPath") if key in rule}
