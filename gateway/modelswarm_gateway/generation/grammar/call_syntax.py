"""The tool calls of each family of models as Lark: the counterpart of the readers in `tool_calls/`.

A model may write calls in several ways; its chat template decides which one is used here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.grammar.call_arguments import (
    ArgumentsError,
    json_arguments,
    python_arguments,
    tag_arguments,
)
from modelswarm_gateway.generation.grammar.lark import LarkRules
from modelswarm_gateway.generation.tool_calls import (
    deepseek,
    hermes,
    llama,
    mistral,
    pythonic,
    qwen_xml,
)
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions
from modelswarm_gateway.generation.tool_calls.families import ChatFormat
from modelswarm_gateway.generation.tool_calls.tool import Tool

_CALL_ID = "/[a-zA-Z0-9]{9}/"
_Write: TypeAlias = Callable[[LarkRules, Tool, str], str]


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Expressions of the calls of one answer."""

    calls: str  # all calls of an answer that is nothing else
    trigger: str  # marker of calls within a text
    after_trigger: str  # calls behind it, after which text may go on if `has_text_after`
    has_text_after: bool = True
    opening: str = ""  # regex of a text's begin that is read as a call even without the trigger
    other_trigger: str = ""  # text that is read as a call too, and is not written here
    is_json: bool = (
        False  # a call without the trigger is a JSON object with `name` and `parameters`
    )


def write_syntax(rules: LarkRules, options: AnswerOptions, form: ChatFormat) -> CallSyntax:
    """Add the rules of the calls that the options allow. Raise ApiError."""
    return _WRITERS[form.family_name](rules, options, form.template)


def write_calls(rules: LarkRules, options: AnswerOptions, write: _Write) -> str:
    """Add one rule for each tool that may be called; return the name of the rule of one call."""
    names = []
    for place, tool in enumerate(options.callable_tools):
        name = f"call_{place}"
        if not options.follows_schema(tool):
            tool = replace(tool, parameters=_loosened(tool.parameters))
        try:
            names.append(rules.add_rule(name, write(rules, tool, name)))
        except ArgumentsError as error:
            path = f"{tool.param}.{error.path}"
            raise ApiError(Code.UNSUPPORTED, f"{path}: {error}", param=path) from error
    return rules.add_rule("call", " | ".join(names))


def _loosened(schema: Mapping[str, object]) -> dict[str, object]:
    """Return the schema of an object with the same properties, of which only the plain texts are known."""
    declared = schema.get("properties")
    known = declared if isinstance(declared, Mapping) else {}
    text = {"type": "string"}
    return {
        "properties": {key: text if qwen_xml.is_text(each) else {} for key, each in known.items()}
    }


def _several(call: str, separator: str, options: AnswerOptions) -> str:
    """Return the expression of one call, or more if the options allow them."""
    return call if options.one_call else f"{call} ({separator} {call})*"


def _object(arguments_key: str) -> _Write:
    def write(rules: LarkRules, tool: Tool, name: str) -> str:
        head = json.dumps({"name": tool.name})[:-1] + f', "{arguments_key}": '
        return f"{rules.words(head)} {json_arguments(rules, tool)} {rules.words('}')}"

    return write


def _compact_object(rules: LarkRules, tool: Tool, name: str) -> str:
    """Write an object as the grammar of JSON does: two grammars that begin alike must have the same lexemes."""
    parts = ("{", '"name"', ":", f'"{tool.name}"', ",", '"parameters"', ":")
    return " ".join([*map(rules.words, parts), json_arguments(rules, tool), rules.words("}")])


def _named(middle: str, begin: str = "", end: str = "") -> _Write:
    """Write the tool's name and the arguments behind it."""

    def write(rules: LarkRules, tool: Tool, name: str) -> str:
        head = rules.words(f"{begin}{tool.name}{middle}")
        return f"{head} {json_arguments(rules, tool)} {rules.words(end)}"

    return write


def _hermes(rules: LarkRules, options: AnswerOptions, template: str) -> CallSyntax:
    call = write_calls(rules, options, _object("arguments"))
    return _tagged(rules, options, call, hermes.BEGIN, hermes.END)


def _qwen_xml(rules: LarkRules, options: AnswerOptions, template: str) -> CallSyntax:
    call = write_calls(rules, options, tag_arguments)
    made = _tagged(rules, options, call, qwen_xml.BEGIN, qwen_xml.END)
    return replace(made, other_trigger=qwen_xml.FUNCTION)


def _tagged(
    rules: LarkRules, options: AnswerOptions, call: str, begin: str, end: str
) -> CallSyntax:
    rest = f"{rules.words(chr(10))} {call} {rules.words(chr(10) + end)}"
    one = rules.add_rule("tagged", f"{rules.words(begin)} {rest}")
    return CallSyntax(_several(one, rules.words("\n"), options), begin, rest)


def _llama(rules: LarkRules, options: AnswerOptions, template: str) -> CallSyntax:
    write = _compact_object if options.has_format else _object("parameters")
    call = write_calls(rules, options, write)
    calls = _several(call, rules.words("; "), options)
    return CallSyntax(calls, llama.TAG, calls, has_text_after=False, opening=r"\{", is_json=True)


def _pythonic(rules: LarkRules, options: AnswerOptions, template: str) -> CallSyntax:
    def write(rules: LarkRules, tool: Tool, name: str) -> str:
        arguments = python_arguments(rules, tool, name)
        return f"{rules.words(f'{tool.name}(')} {arguments} {rules.words(')')}"

    call = write_calls(rules, options, write)
    calls = f"{rules.words('[')} {_several(call, rules.words(', '), options)} {rules.words(']')}"
    end = f"({rules.words(pythonic.END)})?"
    begun = f"({rules.words(pythonic.BEGIN)})? {calls} {end}"
    return CallSyntax(
        begun,
        pythonic.BEGIN,
        f"{calls} {end}",
        has_text_after=False,
        opening=r"\[",
    )


def _mistral(rules: LarkRules, options: AnswerOptions, template: str) -> CallSyntax:
    begin = rules.words(mistral.BEGIN)
    if not rules.is_token(mistral.BEGIN):  # JSON may begin with the same bracket
        begin = f"{rules.words('[')} {rules.words(mistral.BEGIN[1:])}"
    if mistral.ARGS not in template:
        call = write_calls(rules, options, _object("arguments"))
        calls = _several(call, rules.words(", "), options)
        calls = f"/ ?/ {rules.words('[')} {calls} {rules.words(']')}"
        return CallSyntax(f"{begin} {calls}", mistral.BEGIN, calls)

    def write(rules: LarkRules, tool: Tool, name: str) -> str:
        head = rules.words(tool.name)
        if mistral.CALL_ID in template:
            head = f"{head} {rules.words(mistral.CALL_ID)} {_CALL_ID}"
        return f"{head} {rules.words(mistral.ARGS)} {json_arguments(rules, tool)}"

    call = write_calls(rules, options, write)
    one = rules.add_rule("marked", f"{begin} {call}")
    return CallSyntax(_several(one, "", options), mistral.BEGIN, call)


def _deepseek(rules: LarkRules, options: AnswerOptions, template: str) -> CallSyntax:
    is_block = f"{deepseek.FENCE}json" in template
    write = _named(deepseek.SEPARATOR)
    if is_block:
        fence = deepseek.FENCE
        begin = f"function{deepseek.SEPARATOR}"
        write = _named(f"\n{fence}json\n", begin, f"\n{fence}")
    call = write_calls(rules, options, write)
    begin, end = rules.words(deepseek.CALL_BEGIN), rules.words(deepseek.CALL_END)
    one = rules.add_rule("marked", f"{begin} {call} {end}")
    separator = rules.words("\n") if is_block else ""
    calls = f"{_several(one, separator, options)} {rules.words(deepseek.END)}"
    return CallSyntax(f"{rules.words(deepseek.BEGIN)} {calls}", deepseek.BEGIN, calls)


_WRITERS: Mapping[str, Callable[[LarkRules, AnswerOptions, str], CallSyntax]] = {
    "mistral": _mistral,
    "deepseek": _deepseek,
    "qwen3_coder": _qwen_xml,
    "hermes": _hermes,
    "pythonic": _pythonic,
    "llama3_json": _llama,
}
