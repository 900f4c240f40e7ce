"""Fields of responses under the names that they have in chat completions, and errors with the names turned back.

Tools, their choice and the format of the text are nested differently in both APIs; their checks are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from modelswarm_gateway.api.fields.responses import (
    ALLOWED_TOOLS,
    TEXT,
    TEXT_FORMAT,
    TOOL,
    TOOL_CHOICE,
)
from modelswarm_gateway.api.tools.objects import read_object
from modelswarm_gateway.errors import ApiError, Code, invalid_field, invalid_request, shorten

_FORMATS = ("text", "json_object", "json_schema")
_NAMES = (
    (re.compile(r"^(tools|tool_choice)(.*)\.function(?=\.)"), r"\1\2"),
    (re.compile(r"^tool_choice\.allowed_tools\b"), "tool_choice"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^max_tokens$"), "max_output_tokens"),
    (re.compile(r"^session_(id|position)$"), "previous_response_id"),
)


def nested_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the tools as chat completions have them. Raise ApiError for other tools than functions."""
    nested = []
    for place, value in enumerate(tools):
        path = f"tools[{place}]"
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(value, dict) and kind != "function":
            detail = f"{shorten(str(kind))!r} is not supported; tools are functions"
            raise ApiError(Code.UNSUPPORTED, f"{path}.type: {detail}", param=f"{path}.type")
        fields = read_object(path, value, TOOL)
        del fields["type"]
        nested.append({"type": "function", "function": fields})
    return nested


def nested_choice(choice: object) -> object:
    """Return `tool_choice` as chat completions have it. Raise ApiError."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        fields = read_object("tool_choice", choice, ALLOWED_TOOLS)
        tools = fields.get("tools")
        if isinstance(tools, list):
            named = enumerate(tools)
            fields["tools"] = [_nested_name(f"tool_choice.tools[{n}]", tool) for n, tool in named]
        del fields["type"]
        return {"type": kind, kind: fields}
    if kind != "function":
        detail = f"{shorten(str(kind))!r} is not supported; send auto, none, required, a function or allowed_tools"
        raise ApiError(Code.UNSUPPORTED, f"tool_choice.type: {detail}", param="tool_choice.type")
    return _nested_name("tool_choice", choice)


def _nested_name(path: str, value: object) -> dict[str, Any]:
    """Return a function that is named by its name only."""
    fields = read_object(path, value, TOOL_CHOICE)
    return {"type": fields.get("type", ""), "function": {"name": fields.get("name")}}


def nested_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return `text.format` as the `response_format` of chat completions; None without one. Raise ApiError."""
    if text is None:
        return None
    wanted = read_object("text", dict(text), TEXT).get("format")
    if wanted is None:
        return None
    fields = read_object("text.format", wanted, TEXT_FORMAT)
    kind = fields.pop("type", None)
    if kind not in _FORMATS:
        detail = f"must be one of {', '.join(_FORMATS)}"
        raise invalid_field("text.format.type", detail)
    if kind != "json_schema":
        if fields:
            path = f"text.format.{min(fields)}"
            raise invalid_request(path, f"{path}: only the type json_schema has this field")
        return {"type": kind}
    return {"type": kind, "json_schema": fields}


def turn_back(error: ApiError) -> ApiError:
    """Return the error with the names of responses, if the field has another name in chat completions."""
    if error.param is None:
        return error
    param = error.param
    for pattern, name in _NAMES:
        param = pattern.sub(name, param)
    message = error.message.replace(error.param, param)
    message = message.replace("response_format", "text.format")
    if (param, message) == (error.param, error.message):
        return error
    return ApiError(error.code, message, param=param, retry_after=error.retry_after)
