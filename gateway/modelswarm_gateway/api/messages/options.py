"""Reads the objects of Anthropic's requests that shape an answer: tools, tool_choice, thinking and output_config."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from modelswarm_gateway.api.fields.messages import (
    ANTHROPIC_TOOL,
    ANTHROPIC_TOOL_CHOICE,
    OUTPUT_CONFIG,
    OUTPUT_FORMAT,
    THINKING,
)
from modelswarm_gateway.api.tools.definitions import MAX_TOOLS
from modelswarm_gateway.api.tools.objects import check_size, read_object, read_text
from modelswarm_gateway.api.tools.schema_checks import check_parameters
from modelswarm_gateway.errors import ApiError, Code, invalid_field, shorten
from modelswarm_gateway.generation.grammar.schema_checks import SchemaError, dump_schema
from modelswarm_gateway.generation.grammar.source import GrammarKind, GrammarSource
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions, ToolChoice
from modelswarm_gateway.generation.tool_calls.tool import Tool

MAX_NAME_LENGTH = 128  # characters of a tool's name, as Anthropic allows
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_LENGTH}}}")
_CHOICES = {
    "auto": ToolChoice.AUTO,
    "any": ToolChoice.REQUIRED,
    "tool": ToolChoice.NAMED,
    "none": ToolChoice.NONE,
}
# Variables of chat templates that turn reasoning off; a template reads the one that it has.
NO_THINKING = {"enable_thinking": False, "thinking": False}


def read_answer(
    tools: Sequence[object], choice: object, *, include_reasoning: bool
) -> AnswerOptions:
    """Return the options of the answer. Raise ApiError."""
    read = _read_tools(tools)
    if choice is None:
        return AnswerOptions(read, include_reasoning=include_reasoning)
    fields = read_object("tool_choice", choice, ANTHROPIC_TOOL_CHOICE)
    kind = read_text("tool_choice", fields, "type")
    if kind not in _CHOICES:
        raise invalid_field("tool_choice.type", f"must be one of {', '.join(_CHOICES)}")
    chosen, name = _CHOICES[kind], fields.get("name", "")
    if chosen is ToolChoice.NAMED and name not in {tool.name for tool in read}:
        raise invalid_field("tool_choice.name", "must be the name of a tool in tools")
    if chosen is not ToolChoice.NAMED and name:
        raise invalid_field("tool_choice.name", 'only a choice with type "tool" has a name')
    if chosen is ToolChoice.REQUIRED and not read:
        raise invalid_field("tool_choice.type", "any needs tools beside it")
    single = fields.get("disable_parallel_tool_use", False)
    if not isinstance(single, bool):
        raise invalid_field("tool_choice.disable_parallel_tool_use", "must be true or false")
    if chosen is ToolChoice.NONE:
        read = ()
    one_call = single or chosen is ToolChoice.NAMED
    return AnswerOptions(read, chosen, name, one_call, include_reasoning)


def _read_tools(values: Sequence[object]) -> tuple[Tool, ...]:
    if len(values) > MAX_TOOLS:
        raise invalid_field("tools", f"at most {MAX_TOOLS}, not {len(values)}")
    check_size("tools", values)
    tools: dict[str, Tool] = {}
    for place, value in enumerate(values):
        tool = _read_tool(f"tools[{place}]", value)
        if tools.setdefault(tool.name, tool) is not tool:
            raise invalid_field(
                f"tools[{place}].name", f"{tool.name!r} is defined twice; names must differ"
            )
    return tuple(tools.values())


def _read_tool(path: str, value: object) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        detail = (
            f"{shorten(str(kind))} is not supported; define the tool yourself, with an input_schema"
        )
        raise ApiError(Code.UNSUPPORTED, f"{path}.type: {detail}", param=f"{path}.type")
    fields = read_object(path, value, ANTHROPIC_TOOL)
    name, description = read_text(path, fields, "name"), fields.get("description")
    if not _NAME.fullmatch(name):
        detail = f"must be 1 to {MAX_NAME_LENGTH} letters, digits, '_' and '-'"
        raise invalid_field(f"{path}.name", f"{detail}, not {shorten(name)!r}")
    if not isinstance(description, str | None):
        raise invalid_field(f"{path}.description", "must be a string")
    strict = fields.get("strict", False)
    if not isinstance(strict, bool):
        raise invalid_field(f"{path}.strict", "must be true or false")
    if "input_schema" not in fields:
        raise invalid_field(f"{path}.input_schema", "this field is required")
    place, schema = f"{path}.input_schema", fields["input_schema"]
    if isinstance(schema, dict):  # the client has null for no properties, and for none required
        schema = {key: value for key, value in schema.items() if value is not None}
    check_parameters(place, schema)
    return Tool(name, schema, description, strict, place)


def read_thinking(value: object) -> tuple[bool, dict[str, Any]]:
    """Return whether reasoning is shown, and the variables of the chat template. Raise ApiError."""
    if value is None:
        return True, {}
    fields = read_object("thinking", value, THINKING)
    kind, display = read_text("thinking", fields, "type"), fields.get("display", "summarized")
    if kind == "enabled":
        detail = 'reasoning cannot be limited to budget_tokens; send {"type": "adaptive"}'
        raise ApiError(Code.UNSUPPORTED, f"thinking.type: {detail}", param="thinking.type")
    if kind not in ("adaptive", "disabled"):
        raise invalid_field("thinking.type", 'must be "adaptive" or "disabled"')
    if display not in ("summarized", "omitted"):
        raise invalid_field("thinking.display", 'must be "summarized" or "omitted"')
    is_on = kind == "adaptive"
    return is_on and display == "summarized", {} if is_on else dict(NO_THINKING)


def check_continuation(answer: AnswerOptions, *, is_thinking: bool) -> None:
    """Raise ApiError for options of an answer that cannot continue the assistant's message."""
    detail = "the answer continues the assistant's message"
    if is_thinking:
        raise invalid_field(
            "thinking", f"{detail}, after its reasoning; end with a message of the user"
        )
    if answer.must_call:
        raise invalid_field("tool_choice", f"{detail}, and a forced call begins one; leave it out")


def read_output_config(value: object) -> tuple[str | None, GrammarSource | None]:
    """Return the effort, and the grammar of the answer. Raise ApiError."""
    if value is None:
        return None, None
    fields = read_object("output_config", value, OUTPUT_CONFIG)
    effort = fields.get("effort")
    if not isinstance(effort, str | None):
        raise invalid_field("output_config.effort", "must be a string")
    if "format" not in fields:
        return effort, None
    path = "output_config.format"
    form = read_object(path, fields["format"], OUTPUT_FORMAT)
    if read_text(path, form, "type") != "json_schema":
        raise invalid_field(f"{path}.type", 'must be "json_schema"')
    path = f"{path}.schema"
    try:
        text = dump_schema(form.get("schema"), strict=False)
    except SchemaError as error:
        raise invalid_field(path, str(error)) from error
    return effort, GrammarSource(GrammarKind.JSON_SCHEMA, text, path)
