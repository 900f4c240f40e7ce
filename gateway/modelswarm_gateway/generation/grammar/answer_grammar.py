"""The grammar of a chat's answer: reasoning, and text with calls in the form of the model's family, or a format.

Made of a chat's answer options, the model's format and the end of its prompt. Whatever it accepts, the family's parser
reads as calls of the allowed tools, with arguments that follow their schemas. An answer with a format is calls, or
content that follows the format; the parser tells them apart by how they begin.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelswarm_gateway.errors import ApiError, Code, invalid_request
from modelswarm_gateway.generation.grammar.call_arguments import json_arguments
from modelswarm_gateway.generation.grammar.call_syntax import (
    CallSyntax,
    write_calls,
    write_syntax,
)
from modelswarm_gateway.generation.grammar.content_format import may_be_call, write_content
from modelswarm_gateway.generation.grammar.lark import (
    ANY_TEXT,
    GrammarTooLarge,
    LarkRules,
    holding,
    regex_of,
)
from modelswarm_gateway.generation.grammar.schema_checks import SchemaError, dump_schema
from modelswarm_gateway.generation.grammar.source import GrammarKind, GrammarPart, GrammarSource
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions, opens_reasoning
from modelswarm_gateway.generation.tool_calls.families import ChatFormat
from modelswarm_gateway.generation.tool_calls.harmony import (
    CHANNEL,
    CONSTRAIN,
    ENDS,
    MESSAGE,
    START,
)
from modelswarm_gateway.generation.tool_calls.reader import END_THINK, THINK
from modelswarm_gateway.generation.tool_calls.tool import Tool

_SPACE = r"/\s{0,4}/"  # around reasoning; without a limit a model could go on for ever


def answer_grammar(
    options: AnswerOptions,
    form: ChatFormat,
    prompt_end: str,
    special: Mapping[str, int],
    content: GrammarSource | None = None,
) -> GrammarSource | None:
    """Return the grammar of an answer with these options; None if they constrain nothing. Raise ApiError.

    `prompt_end`: text of the prompt's last tokens. `special`: markers of the format that are one token of the model,
    with its id. `content`: format of an answer that calls nothing.
    """
    if not options.is_constrained and content is None:
        return None
    tools = [tool for tool in options.callable_tools if options.follows_schema(tool)]
    parts = [_part(tool) for tool in tools]
    param = "tool_choice" if options.must_call or options.allowed else "tools"
    if content is not None:
        parts.append(GrammarPart(content.param, content.text, content.kind))
        param = content.param
    rules = LarkRules(special)
    try:
        rules.add_rule("start", _answer(rules, options, form, prompt_end, content))
    except GrammarTooLarge as error:
        raise invalid_request(param, f"{param}: {error}") from error
    tokens = tuple(sorted(special.items()))
    return GrammarSource(GrammarKind.ANSWER, rules.text, param, parts=tuple(parts), tokens=tokens)


def _answer(
    rules: LarkRules,
    options: AnswerOptions,
    form: ChatFormat,
    prompt_end: str,
    content: GrammarSource | None,
) -> str:
    """Return the expression of the whole answer."""
    if form.is_harmony:
        return _harmony_answer(rules, options, content)
    if options.must_call:
        return _calls_only(rules, options, form, prompt_end)
    if content is not None:
        return _calls_or_content(rules, options, form, prompt_end, content)
    return _text_with_calls(rules, options, form, prompt_end)


def _part(tool: Tool) -> GrammarPart:
    try:
        schema = {"type": "object", **tool.parameters}
        return GrammarPart(tool.param, dump_schema(schema, strict=tool.is_strict))
    except SchemaError as error:
        raise invalid_request(tool.param, f"{tool.param}: {error}") from error


def _calls_only(rules: LarkRules, options: AnswerOptions, form: ChatFormat, prompt_end: str) -> str:
    calls = write_syntax(rules, options, form).calls
    return _after_reasoning(rules, form, prompt_end, calls)


def _calls_or_content(
    rules: LarkRules,
    options: AnswerOptions,
    form: ChatFormat,
    prompt_end: str,
    content: GrammarSource,
) -> str:
    """Return the expression of an answer that is calls, or content in its format."""
    syntax = write_syntax(rules, options, form) if options.tools else None
    begins = _begins_of_calls(syntax, content) if syntax else []
    if form.has_reasoning and not opens_reasoning(prompt_end):
        begins.append(regex_of(THINK))
    body = write_content(rules, content, begins)
    if syntax:
        body = f"({syntax.calls} | {body})"
    return _after_reasoning(rules, form, prompt_end, body)


def _begins_of_calls(syntax: CallSyntax, content: GrammarSource) -> list[str]:
    """Return regexes of what the parser takes for a call's beginning. Raise ApiError if JSON content looks alike."""
    if syntax.is_json and may_be_call(content):
        detail = (
            "a call of this model is a JSON object with name and parameters, which this format allows too; "
            "describe an object without both, with additionalProperties: false, or leave tools out"
        )
        raise ApiError(Code.UNSUPPORTED, f"{content.param}: {detail}", param=content.param)
    markers = [regex_of(each) for each in (syntax.trigger, syntax.other_trigger) if each]
    return [*markers, syntax.opening] if syntax.opening else markers


def _after_reasoning(rules: LarkRules, form: ChatFormat, prompt_end: str, body: str) -> str:
    """Return the expression of the answer behind a reasoning, which the model may leave out if none is opened."""
    if not form.has_reasoning:
        return body
    mark = "" if opens_reasoning(prompt_end) else "?"
    return f"({_reasoning(rules, prompt_end)}){mark} {body}"


def _reasoning(rules: LarkRules, prompt_end: str) -> str:
    body = f"{rules.up_to(END_THINK, 'reasoning')} {_SPACE}"
    if opens_reasoning(prompt_end):
        return body
    begin = rf"/\s{{0,4}}{regex_of(THINK)}/"
    if rules.is_token(THINK):
        begin = f"{_SPACE} {rules.words(THINK)}"
    return f"{begin} {body}"


def _text_with_calls(
    rules: LarkRules, options: AnswerOptions, form: ChatFormat, prompt_end: str
) -> str:
    """Return the expression of a text in which calls may stand."""
    syntax = write_syntax(rules, options, form)
    # A trigger that is a token could be spelled, and the parser would read it.
    kept_out = [syntax.other_trigger]
    if rules.is_token(syntax.trigger):
        kept_out.append(syntax.trigger)
    text = rules.add_rule(
        "TEXT", " & ".join([ANY_TEXT, *(f"~{holding(t)}" for t in kept_out if t)])
    )
    more = ""
    if syntax.has_text_after and not options.one_call:
        more = f"({rules.up_to(syntax.trigger, 'again', starts=text)} {syntax.after_trigger})* TEXT"

    def body(name: str, *not_first: str) -> str:
        """Return the expression of an answer whose text does not begin with one of these regexes."""
        first = text
        if begins := "|".join(each for each in not_first if each):
            first = rules.add_rule(name.upper(), rf"TEXT & ~/\s*({begins})(.|\n)*/")
        called = rules.up_to(syntax.trigger, f"{name}_call", starts=first)
        found = [first, f"{called} {syntax.after_trigger} {more}"]
        if syntax.opening:
            found.append(f"{syntax.calls} {more}")
        return rules.add_rule(name, " | ".join(found))

    if not form.has_reasoning:
        return body("answer", syntax.opening)
    reasoned = f"{_reasoning(rules, prompt_end)} {body('answer', syntax.opening)}"
    if opens_reasoning(prompt_end):
        return reasoned
    return f"{reasoned} | {body('direct', syntax.opening, regex_of(THINK))}"


def _harmony_answer(rules: LarkRules, options: AnswerOptions, content: GrammarSource | None) -> str:
    """Return the expression of harmony's messages behind <|start|>assistant: analysis, then one call or the answer."""

    def write(rules: LarkRules, tool: Tool, name: str) -> str:
        head = f"{CHANNEL}commentary to=functions.{tool.name} {CONSTRAIN}json{MESSAGE}"
        return f"{rules.words(head)} {json_arguments(rules, tool)}"

    # Text on the channel of commentary is shown, so it is no part of calls, or of content with a format.
    is_plain = not options.must_call and content is None
    channels = ("analysis", "commentary") if is_plain else ("analysis",)
    heads = " | ".join(rules.words(f"{CHANNEL}{channel}{MESSAGE}") for channel in channels)
    message = f"({heads}) {rules.up_to(ENDS[0], 'body')} {rules.words(f'{START}assistant')}"
    before = f"({message})*"
    if options.must_call:
        return f"{before} {write_calls(rules, options, write)}"
    text = ANY_TEXT if content is None else write_content(rules, content, ())
    final = f"{rules.words(f'{CHANNEL}final{MESSAGE}')} {text}"
    if not options.tools:
        return f"{before} {final}"
    return f"{before} ({write_calls(rules, options, write)} | {final})"
