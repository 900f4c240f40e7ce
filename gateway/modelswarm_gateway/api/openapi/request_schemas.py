"""JSON schemas of request bodies, from the models of requests and the tables of their fields.

A field that is refused has the values that change nothing, so a body that fits the schema is not refused for a field.
Used by `document.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelswarm_gateway.api.fields import formats, messages, responses
from modelswarm_gateway.api.fields.request_model import RequestModel
from modelswarm_gateway.api.fields.states import FieldTable, NoEffect, Refused, Renamed, State
from modelswarm_gateway.api.fields.tools import (
    ALLOWED_TOOL,
    ALLOWED_TOOLS,
    ALLOWED_TOOLS_CHOICE,
    CALLED_FUNCTION,
    CHOSEN_FUNCTION,
    FUNCTION,
    TOOL,
    TOOL_CALL,
    TOOL_CHOICE,
)
from modelswarm_gateway.api.http.validation_messages import ALLOWED

Schema = dict[str, Any]
PLACE = "#/components/schemas/"
_NULL: Schema = {"type": "null"}


def body_schemas(model: type[RequestModel]) -> dict[str, Schema]:
    """Return the schemas of a request's body and of the objects in it, by name."""
    made = model.model_json_schema(ref_template=f"{PLACE}{{model}}")
    found: dict[str, Schema] = made.pop("$defs", {}) | {model.__name__: made}
    tables = {each.__name__: each.table for each in _models()}
    for name, schema in found.items():
        _add_fields(schema, tables[name])
    return found


def _models(base: type[RequestModel] = RequestModel) -> Iterator[type[RequestModel]]:
    for model in base.__subclasses__():
        if hasattr(model, "table"):
            yield model
        yield from _models(model)


def _add_fields(schema: Schema, table: FieldTable) -> None:
    """Describe the model's fields, and add the table's others."""
    properties = schema["properties"]
    words, objects = ALLOWED, _OBJECTS
    if table is responses.RESPONSES:
        words, objects = ALLOWED | responses.OWN_WORDS, _OBJECTS_OF_RESPONSES
    elif table in (messages.MESSAGES, messages.COUNT_TOKENS):
        words, objects = ALLOWED | messages.WORDS, _OBJECTS_OF_MESSAGES
    _close_patterns(properties)
    for name in properties:
        properties[name].pop("title", None)
        properties[name]["description"] = words[name]
        properties[name] |= objects.get(name, {})
    others = {name: state for name, state in table.states.items() if name not in properties}
    properties |= {name: _other_field(state) for name, state in others.items()}


def _close_patterns(part: Any) -> None:
    """Allow no other keys in mappings whose keys have a pattern; pydantic leaves that out."""
    if isinstance(part, dict) and "patternProperties" in part:
        part["additionalProperties"] = False
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _close_patterns(each)


def _other_field(state: State) -> Schema:
    match state:
        case Refused(reason, harmless):
            return {"enum": [None, *harmless], "description": f"Refused: {reason}."}
        case Renamed(name):
            return {"description": f"Refused without the same value in `{name}`."}
        case NoEffect(reason):
            return {"description": f"No effect: {reason}."}
        case _:
            return {}


def _object(table: FieldTable, inner: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object that is checked without a model."""
    fields = {name: _other_field(state) for name, state in table.states.items()}
    return {
        "type": "object",
        "properties": fields | dict(inner or {}),
        "additionalProperties": False,
    }


def _list_of(item: Schema) -> Schema:
    return {"anyOf": [{"type": "array", "items": item}, _NULL]}


def _texts(*parts: Schema) -> Schema:
    """Return the schema of a content: a string, or a list of these parts."""
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": list(parts)}}]}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _kinds(*names: str) -> Schema:
    return {"type": {"enum": list(names)}}


_ALLOWED = _list_of(_object(ALLOWED_TOOL, {"function": _object(CHOSEN_FUNCTION)}))
_STRUCTURES = _list_of(_object(formats.STRUCTURE))
_TAG: Schema = {
    "anyOf": [{"type": "string"}, _object(formats.TAG_FORMAT, {"structures": _STRUCTURES}), _NULL]
}
# Fields whose objects have tables.
_OBJECTS: dict[str, Schema] = {
    "tools": _list_of(_object(TOOL, {"function": _object(FUNCTION)})),
    "tool_calls": _list_of(_object(TOOL_CALL, {"function": _object(CALLED_FUNCTION)})),
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            _object(TOOL_CHOICE, {"function": _object(CHOSEN_FUNCTION), **_kinds("function")}),
            _object(
                ALLOWED_TOOLS_CHOICE,
                {
                    "allowed_tools": _object(ALLOWED_TOOLS, {"tools": _ALLOWED}),
                    **_kinds("allowed_tools"),
                },
            ),
        ]
    },
    "response_format": {
        "anyOf": [
            _object(formats.TEXT_FORMAT, _kinds("text", "json_object")),
            _object(
                formats.SCHEMA_FORMAT,
                {"json_schema": _object(formats.JSON_SCHEMA), **_kinds("json_schema")},
            ),
            _object(formats.TAG_FORMAT, {"structures": _STRUCTURES, **_kinds("structural_tag")}),
            _NULL,
        ]
    },
    "structured_outputs": {
        "anyOf": [_object(formats.STRUCTURED_OUTPUTS, {"structural_tag": _TAG}), _NULL]
    },
}
_PART = _object(responses.PART)
_OBJECTS_OF_RESPONSES: dict[str, Schema] = {
    "input": _texts(
        _object(responses.MESSAGE, {"content": _texts(_PART), **_kinds("message")}),
        _object(responses.FUNCTION_CALL, _kinds("function_call")),
        _object(
            responses.FUNCTION_CALL_OUTPUT,
            {"output": _texts(_PART), **_kinds("function_call_output")},
        ),
        _object(
            responses.REASONING_ITEM,
            {"content": _or_null(_texts(_PART)), **_kinds("reasoning")},
        ),
    ),
    "tools": _list_of(_object(responses.TOOL)),
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            _object(responses.TOOL_CHOICE),
            _object(responses.ALLOWED_TOOLS),
        ]
    },
    "text": {
        "anyOf": [
            _object(responses.TEXT, {"format": {"anyOf": [_object(responses.TEXT_FORMAT), _NULL]}}),
            _NULL,
        ]
    },
    "reasoning": {"anyOf": [_object(responses.REASONING), _NULL]},
    "stream_options": {"anyOf": [_object(responses.STREAM_OPTIONS), _NULL]},
}
_TEXT_BLOCK = _object(messages.TEXT_BLOCK, _kinds("text"))
_BLOCKS = _texts(
    _TEXT_BLOCK,
    _object(messages.THINKING_BLOCK, _kinds("thinking")),
    _object(messages.TOOL_USE_BLOCK, _kinds("tool_use")),
    _object(
        messages.TOOL_RESULT_BLOCK,
        {"content": _or_null(_texts(_TEXT_BLOCK)), **_kinds("tool_result")},
    ),
)
_OBJECTS_OF_MESSAGES: dict[str, Schema] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": _object(messages.INPUT_MESSAGE, {"content": _BLOCKS}),
    },
    "system": _or_null(_texts(_TEXT_BLOCK)),
    "tools": _list_of(_object(messages.ANTHROPIC_TOOL)),
    "tool_choice": {"anyOf": [_object(messages.ANTHROPIC_TOOL_CHOICE), _NULL]},
    "thinking": {"anyOf": [_object(messages.THINKING), _NULL]},
    "output_config": {
        "anyOf": [
            _object(messages.OUTPUT_CONFIG, {"format": _object(messages.OUTPUT_FORMAT)}),
            _NULL,
        ]
    },
}
