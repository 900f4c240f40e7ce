"""Grammars of a call's arguments: as JSON, as Python's keyword arguments, or as Qwen3-Coder's tags.

JSON follows the tool's whole schema. The other two forms have one entry for each declared property, in the order of the
schema. What a form cannot express is refused by the path of the keyword.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelswarm_gateway.generation.grammar.lark import LarkRules
from modelswarm_gateway.generation.grammar.schema_checks import subschemas
from modelswarm_gateway.generation.tool_calls.qwen_xml import (
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    PARAMETER,
    is_text,
)
from modelswarm_gateway.generation.tool_calls.tool import Tool

_DEFINITIONS = ("$defs", "definitions")
# Keywords of the arguments as a whole that entries one by one do not enforce.
_OF_THE_WHOLE = (
    *("anyOf", "oneOf", "allOf", "not", "if", "$ref", "enum", "const", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)
_OF_TEXT = ("pattern", "format", "anyOf", "oneOf", "allOf", "not", "if", "$ref")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TAG_KEY = re.compile(r"[^<>\n]{1,256}")


class ArgumentsError(ValueError):
    """The form of this model's calls cannot express a schema. `path`: of the keyword, within the schema."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"{detail}, which this model's form of calls cannot express; leave it out")
        self.path = path


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    schema: Mapping[str, Any]
    is_required: bool


def json_arguments(rules: LarkRules, tool: Tool) -> str:
    """Return the expression of the arguments as a JSON object."""
    return rules.json({"type": "object", **tool.parameters})


def python_arguments(rules: LarkRules, tool: Tool, name: str) -> str:
    """Return the expression of `key=value, ...`, with JSON as values. `name`: prefix of new rules."""
    entries = list(_entries(tool, _IDENTIFIER, "the name of a Python argument"))
    first = rest = '""'
    for place, entry in reversed(list(enumerate(entries))):
        value = f"{rules.words(entry.key + '=')} {rules.json(entry.schema)}"
        here = f"{value} {rest}"
        follows = f'", " {value} {rest}'
        if not entry.is_required:
            here, follows = f"{here} | {first}", f"{follows} | {rest}"
        first = rules.add_rule(f"{name}_first_{place}", here)
        rest = rules.add_rule(f"{name}_rest_{place}", follows)
    return first


def tag_arguments(rules: LarkRules, tool: Tool, name: str) -> str:
    """Return the expression of Qwen3-Coder's tags of one function. `name`: prefix of new rules."""
    parts = [rules.words(f"{FUNCTION}{tool.name}>\n")]
    for place, entry in enumerate(_entries(tool, _TAG_KEY, "a name without brackets")):
        head = rules.words(f"{PARAMETER}{entry.key}>\n")
        value = _tag_value(rules, entry, f"{name}_{place}")
        parts.append(f"({head} {value})" + ("" if entry.is_required else "?"))
    parts.append(rules.words(END_FUNCTION))
    return " ".join(parts)


def _tag_value(rules: LarkRules, entry: _Entry, name: str) -> str:
    """Return the expression of a value and its end."""
    end = f"\n{END_PARAMETER}"
    if not is_text(entry.schema):
        return f"{rules.json(entry.schema)} {rules.words(end + chr(10))}"
    path = f"properties.{entry.key}"
    for keyword in _OF_TEXT:
        if keyword in entry.schema:
            raise ArgumentsError(f"{path}.{keyword}", f"{keyword} of a plain text")
    values = _constants(entry.schema)
    if values is not None:
        for value in values:
            if not isinstance(value, str) or END_PARAMETER in value or value.startswith("\n"):
                raise ArgumentsError(path, f"the value {json.dumps(value)[:64]} of a plain text")
        return f"({' | '.join(rules.words(f'{value}{end}{chr(10)}') for value in values)})"
    least, most = int(entry.schema.get("minLength", 0)), entry.schema.get("maxLength")
    most = "" if most is None else int(most)
    text = rules.add_rule(f"{name.upper()}_TEXT", rf"/(.|\n){{{least},{most}}}/")
    return f"{rules.up_to(end, name, starts=text)} {rules.words(chr(10))}"


def _constants(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _entries(tool: Tool, keys: re.Pattern[str], allowed: str) -> Iterator[_Entry]:
    """Yield an entry for each property. Raise ArgumentsError for what entries one by one cannot express."""
    schema = tool.parameters
    for keyword in _OF_THE_WHOLE:
        if keyword in schema:
            raise ArgumentsError(keyword, f"{keyword} of all arguments together")
    required = set(schema.get("required", ()))
    declared: dict[str, Any] = dict(schema.get("properties", {}))
    more = schema.get("additionalProperties")
    for key in sorted(required - declared.keys()):
        declared[key] = more
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    for name in shared:
        _check_references(name, {name: shared[name]})
    for key, value in declared.items():
        _check_references(f"properties.{key}", value)
        if not keys.fullmatch(key):
            raise ArgumentsError(f"properties.{key}", f"{key[:64]!r} is not {allowed}")
        if value is not False:
            own = value if isinstance(value, Mapping) else {}
            yield _Entry(key, {**own, **shared}, key in required)


def _check_references(path: str, schema: Any) -> None:
    """Raise ArgumentsError for a reference to anything but definitions: each property's schema is a root here."""
    for part in subschemas(schema):
        target = part.get("$ref")
        if not isinstance(target, str) or (target != "#" and not target.startswith("#/")):
            continue
        if not target.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS)):
            raise ArgumentsError(path, f"a $ref to {target[:64]!r} instead of $defs")
