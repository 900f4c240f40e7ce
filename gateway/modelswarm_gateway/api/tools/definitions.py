"""Reads `tools`, `tool_choice` and `parallel_tool_calls` of a request, and refuses those that no model could obey."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from modelswarm_gateway.api.fields.tools import CHOSEN_FUNCTION, FUNCTION, TOOL, TOOL_CHOICE
from modelswarm_gateway.api.tools.objects import check_type, read_object, read_text
from modelswarm_gateway.api.tools.schema_checks import check_parameters
from modelswarm_gateway.errors import ApiError, Code, invalid_request, shorten
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions, ToolChoice
from modelswarm_gateway.generation.tool_calls.tool import Tool

MAX_TOOLS = 128  # OpenAI's limit
MAX_TOOL_BYTES = 256 << 10  # of all tools of a request, as JSON
MAX_NAME_LENGTH = 64  # characters of a function's name
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_LENGTH}}}")
_NO_PARAMETERS = {"type": "object", "properties": {}}
_WORDS = tuple(choice.value for choice in ToolChoice if choice is not ToolChoice.NAMED)


def read_answer_options(
    tools: Sequence[Any] | None, choice: object, parallel: bool | None, *, include_reasoning: bool
) -> AnswerOptions:
    """Return the options. Raise ApiError for tools or a choice that contradict themselves or each other."""
    read = read_tools(tools or ())
    chosen, name = _read_choice(choice, read)
    if chosen is ToolChoice.NONE:
        read = ()
    if not read and parallel is not None and not parallel and not tools:
        raise invalid_request(
            "parallel_tool_calls", "parallel_tool_calls: needs tools beside it; leave it out"
        )
    one_call = parallel is False or chosen is ToolChoice.NAMED
    return AnswerOptions(read, chosen, name, one_call, include_reasoning)


def read_tools(values: Sequence[Any]) -> tuple[Tool, ...]:
    if len(values) > MAX_TOOLS:
        raise invalid_request("tools", f"tools: at most {MAX_TOOLS}, not {len(values)}")
    if values and len(json.dumps(values)) > MAX_TOOL_BYTES:
        raise invalid_request("tools", f"tools: at most {MAX_TOOL_BYTES >> 10} KiB of JSON")
    tools: dict[str, Tool] = {}
    for place, value in enumerate(values):
        path = f"tools[{place}]"
        tool = _read_tool(path, value)
        if tools.setdefault(tool.name, tool) is not tool:
            path = f"{path}.function.name"
            raise invalid_request(
                path, f"{path}: {tool.name!r} is defined twice; names must differ"
            )
    return tuple(tools.values())


def _read_tool(path: str, value: object) -> Tool:
    fields = read_object(path, value, TOOL)
    read_text(path, fields, "type")
    check_type(path, fields)
    path = f"{path}.function"
    function = read_object(path, fields.get("function"), FUNCTION)
    name = read_text(path, function, "name")
    if not _NAME.fullmatch(name):
        detail = (
            f"must be 1 to {MAX_NAME_LENGTH} letters, digits, '_' and '-', not {shorten(name)!r}"
        )
        raise invalid_request(f"{path}.name", f"{path}.name: {detail}")
    description, strict = function.get("description"), function.get("strict", False)
    if not isinstance(description, str | None):
        raise invalid_request(f"{path}.description", f"{path}.description: must be a string")
    if not isinstance(strict, bool):
        raise invalid_request(f"{path}.strict", f"{path}.strict: must be true or false")
    parameters = function.get("parameters", _NO_PARAMETERS)
    check_parameters(f"{path}.parameters", parameters)
    return Tool(name, parameters, description, strict)


def _read_choice(choice: object, tools: Sequence[Tool]) -> tuple[ToolChoice, str]:
    """Return the choice, and the name of the function if one is chosen."""
    if choice is None:
        return ToolChoice.AUTO, ""
    if isinstance(choice, str):
        if choice not in _WORDS:
            detail = f'must be one of {", ".join(_WORDS)}, or {{"type": "function", "function": {{"name": ...}}}}'
            raise invalid_request("tool_choice", f"tool_choice: {detail}")
        if choice == ToolChoice.REQUIRED.value and not tools:
            raise invalid_request("tool_choice", "tool_choice: required needs tools beside it")
        return ToolChoice(choice), ""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        detail = "allowed_tools is not supported; send only the allowed tools"
        raise ApiError(Code.UNSUPPORTED, f"tool_choice: {detail}", param="tool_choice")
    fields = read_object("tool_choice", choice, TOOL_CHOICE)
    check_type("tool_choice", fields)
    path = "tool_choice.function"
    name = read_text(path, read_object(path, fields.get("function"), CHOSEN_FUNCTION), "name")
    if name not in {tool.name for tool in tools}:
        detail = f"tool_choice: {shorten(name)!r} is not the name of a function in tools"
        raise invalid_request("tool_choice", detail)
    return ToolChoice.NAMED, name
