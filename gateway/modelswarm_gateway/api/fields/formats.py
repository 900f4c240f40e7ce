"""Fields of the objects that constrain an answer: `response_format` by its type, and `structured_outputs`.

`take_formats` checks their names; `generation/grammar/request_fields.py` reads their values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from modelswarm_gateway.api.fields.extensions import NOT_BUILT
from modelswarm_gateway.api.fields.states import OBEYED, FieldTable, NoEffect, Section, refused
from modelswarm_gateway.api.tools.objects import read_object
from modelswarm_gateway.errors import invalid_field

_TAG = "structural_tag"
_OF_SCHEMA = refused("it needs the type json_schema")
_OF_TAG = refused("it needs the type structural_tag")
_SCHEMA_BESIDE_TYPE = refused("a schema belongs in json_schema, with the type json_schema")
_ONLY_TYPE: Section = {"type": OBEYED, "json_schema": _OF_SCHEMA, "schema": _SCHEMA_BESIDE_TYPE}

TEXT_FORMAT = FieldTable(
    "response_format with the type text or json_object",
    {"OpenAI": _ONLY_TYPE, "vLLM": {"structures": _OF_TAG, "triggers": _OF_TAG}},
)
SCHEMA_FORMAT = FieldTable(
    "response_format with the type json_schema",
    {
        "OpenAI": {"type": OBEYED, "json_schema": OBEYED, "schema": _SCHEMA_BESIDE_TYPE},
        "vLLM": {"structures": _OF_TAG, "triggers": _OF_TAG},
    },
)
TAG_FORMAT = FieldTable(
    "a structural tag",
    {
        "OpenAI": {"type": OBEYED, "json_schema": _OF_SCHEMA},
        "vLLM": {"structures": OBEYED, "triggers": OBEYED, "format": refused(NOT_BUILT)},
    },
)
JSON_SCHEMA = FieldTable(
    "response_format.json_schema",
    {
        "OpenAI": {
            "name": OBEYED,
            "schema": OBEYED,
            "strict": OBEYED,
            "description": NoEffect("the schema's own descriptions are not shown either"),
        }
    },
)
STRUCTURE = FieldTable(
    "a structure of a structural tag", {"vLLM": {"begin": OBEYED, "schema": OBEYED, "end": OBEYED}}
)
STRUCTURED_OUTPUTS = FieldTable(
    "structured_outputs",
    {
        "vLLM": {
            "json": OBEYED,
            "regex": OBEYED,
            "choice": OBEYED,
            "grammar": OBEYED,
            "json_object": OBEYED,
            "structural_tag": OBEYED,
            "whitespace_pattern": OBEYED,
            "disable_any_whitespace": OBEYED,
            "disable_additional_properties": refused(
                "put additionalProperties: false into the schema", False
            ),
        }
    },
)

FORMATS: dict[str, FieldTable] = {
    "text": TEXT_FORMAT,
    "json_object": TEXT_FORMAT,
    "json_schema": SCHEMA_FORMAT,
    _TAG: TAG_FORMAT,
}
FORMAT_TABLES = (
    TEXT_FORMAT,
    SCHEMA_FORMAT,
    JSON_SCHEMA,
    TAG_FORMAT,
    STRUCTURE,
    STRUCTURED_OUTPUTS,
)
_TEXT = "a string"
WORDS = {
    "type": "text, json_object, json_schema or structural_tag",
    "json_schema": "an object with a name and a schema",
    "name": "1 to 64 letters, digits, '_' and '-'",
    "schema": "a JSON schema, which is an object",
    "strict": "true: unknown keywords of the schema are refused; or false",
    "structures": "a list of objects, not empty",
    "triggers": "a list of strings, not empty; each begin starts with one of them",
    "begin": _TEXT,
    "end": _TEXT,
    "json": "a JSON schema, an object or its text",
    "regex": _TEXT,
    "choice": "a list of strings",
    "grammar": "Lark or GBNF, a string",
    "json_object": "true or false",
    "structural_tag": "an object with structures and triggers, or its text",
    "whitespace_pattern": "a regex of 1 to 256 characters",
    "disable_any_whitespace": "true or false",
}


def take_formats(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a grammar, with those of their parts that have an effect. Raise ApiError."""
    made = dict(fields)
    if (form := fields.get("response_format")) is not None:
        made["response_format"] = _take_format("response_format", form)
    if (outputs := fields.get("structured_outputs")) is not None:
        taken = read_object("structured_outputs", outputs, STRUCTURED_OUTPUTS)
        if "structural_tag" in taken:
            path = "structured_outputs.structural_tag"
            taken["structural_tag"] = _take_tag(path, _parse(path, taken["structural_tag"]))
        made["structured_outputs"] = taken
    return made


def _take_format(path: str, form: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in FORMATS:
        return form  # its reader names the types that there are
    if kind == _TAG:
        return _take_tag(path, form)
    taken = read_object(path, form, FORMATS[kind])
    if isinstance(schema := taken.get("json_schema"), dict):
        taken["json_schema"] = read_object(f"{path}.json_schema", schema, JSON_SCHEMA)
    return taken


def _take_tag(path: str, tag: object) -> dict[str, Any]:
    taken = read_object(path, tag, TAG_FORMAT)
    if taken.get("type", _TAG) != _TAG:
        raise invalid_field(f"{path}.type", f'must be "{_TAG}"')
    if isinstance(structures := taken.get("structures"), list):
        taken["structures"] = [
            read_object(f"{path}.structures[{place}]", each, STRUCTURE)
            for place, each in enumerate(structures)
        ]
    return taken


def _parse(path: str, value: object) -> object:
    """Return a value that may be given as its text, as vLLM does. Raise ApiError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise invalid_field(path, f"is not JSON: {error}") from error
