"""Reads `tools`, `tool_choice` and `parallel_tool_calls` of a request, and refuses those that no model could obey."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from modelswarm_gateway.api.fields.tools import (
    ALLOWED_TOOL,
    ALLOWED_TOOLS,
    ALLOWED_TOOLS_CHOICE,
    CHOSEN_FUNCTION,
    FUNCTION,
    TOOL,
    TOOL_CHOICE,
)
from modelswarm_gateway.api.tools.objects import check_size, check_type, read_object, read_text
from modelswarm_gateway.api.tools.schema_checks import check_parameters
from modelswarm_gateway.errors import invalid_field, invalid_request, shorten
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions, ToolChoice
from modelswarm_gateway.generation.tool_calls.tool import Tool

MAX_TOOLS = 128  # OpenAI's limit
MAX_NAME_LENGTH = 64  # characters of a function's name
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_LENGTH}}}")
_NO_PARAMETERS = {"type": "object", "properties": {}}
_WORDS = tuple(choice.value for choice in ToolChoice if choice is not ToolChoice.NAMED)


def read_answer_options(
    tools: Sequence[Any] | None, choice: object, parallel: bool | None, *, include_reasoning: bool
) -> AnswerOptions:
    """Return the options. Raise ApiError for tools or a choice that contradict themselves or each other."""
    read = read_tools(tools or ())
    names = {tool.name for tool in read}
    allowed: tuple[str, ...] = ()
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        chosen, allowed = _read_allowed_tools(choice, names)
        name = ""
    else:
        chosen, name = _read_choice(choice, names)
    if chosen is ToolChoice.NONE:
        read = ()
    if not read and parallel is not None and not parallel and not tools:
        raise invalid_field("parallel_tool_calls", "needs tools beside it; leave it out")
    one_call = parallel is False or chosen is ToolChoice.NAMED
    return AnswerOptions(read, chosen, name, one_call, include_reasoning, allowed)


def read_tools(values: Sequence[Any]) -> tuple[Tool, ...]:
    if len(values) > MAX_TOOLS:
        raise invalid_field("tools", f"at most {MAX_TOOLS}, not {len(values)}")
    check_size("tools", values)
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
    return Tool(name, parameters, description, strict, f"{path}.parameters")


def _read_choice(choice: object, names: Collection[str]) -> tuple[ToolChoice, str]:
    """Return the choice, and the name of the function if one is chosen."""
    if choice is None:
        return ToolChoice.AUTO, ""
    if isinstance(choice, str):
        if choice not in _WORDS:
            detail = f'must be one of {", ".join(_WORDS)}, or {{"type": "function", "function": {{"name": ...}}}}'
            raise invalid_field("tool_choice", detail)
        if choice == ToolChoice.REQUIRED.value and not names:
            raise invalid_field("tool_choice", "required needs tools beside it")
        return ToolChoice(choice), ""
    fields = read_object("tool_choice", choice, TOOL_CHOICE)
    check_type("tool_choice", fields)
    return ToolChoice.NAMED, _read_chosen("tool_choice", fields, names)


def _read_allowed_tools(
    choice: dict[str, Any], names: Collection[str]
) -> tuple[ToolChoice, tuple[str, ...]]:
    """Return whether one of the allowed tools must be called, and their names."""
    fields = read_object("tool_choice", choice, ALLOWED_TOOLS_CHOICE)
    path = "tool_choice.allowed_tools"
    allowed = read_object(path, fields.get("allowed_tools"), ALLOWED_TOOLS)
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise invalid_request(f"{path}.mode", f'{path}.mode: must be "auto" or "required"')
    if not isinstance(tools, list) or not tools:
        detail = "must be a list of functions, not empty"
        raise invalid_request(f"{path}.tools", f"{path}.tools: {detail}")
    found = []
    for place, value in enumerate(tools):
        here = f"{path}.tools[{place}]"
        tool = read_object(here, value, ALLOWED_TOOL)
        check_type(here, tool)
        found.append(_read_chosen(here, tool, names))
    return ToolChoice(mode), tuple(dict.fromkeys(found))


def _read_chosen(path: str, fields: dict[str, Any], names: Collection[str]) -> str:
    """Return the name of a function that the request has among its tools."""
    inner = f"{path}.function"
    name = read_text(inner, read_object(inner, fields.get("function"), CHOSEN_FUNCTION), "name")
    if name not in names:
        detail = f"{path}: {shorten(name)!r} is not the name of a function in tools"
        raise invalid_request(path, detail)
    return name
