"""Grammars of answers with tools: what they accept, their family's parser reads as calls that follow the schemas."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.models.answer_walks import (
    CALL,
    MOVE,
    TEMPLATES,
    TOOLS,
    Walk,
    calls_of,
    check_calls,
    form_of,
    read,
    source_of,
)

from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.generation.grammar.answer_grammar import answer_grammar
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions, ToolChoice
from modelswarm_gateway.generation.tool_calls.events import (
    ReasoningDelta,
    TextDelta,
)
from modelswarm_gateway.generation.tool_calls.families import FAMILIES
from modelswarm_gateway.generation.tool_calls.tool import Tool


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_forced_answers_are_calls_that_follow_schemas(name: str, are_tokens: bool) -> None:
    form = form_of(name)
    options = AnswerOptions(TOOLS, ToolChoice.REQUIRED)
    source = source_of(form, options, are_tokens=are_tokens)
    counts = set()
    for seed in range(30):
        walk = Walk(source)
        assert walk.feed(CALL if name == "openai" else "")
        walk.go_at_random(random.Random(seed))
        events = read(form, options, walk.text)
        calls = calls_of(events)
        assert calls, walk.text
        assert not any(isinstance(event, TextDelta) for event in events), walk.text
        check_calls(calls)
        counts.add(len(calls))
    assert (max(counts) > 1) == (name != "openai")


@pytest.mark.parametrize("name", TEMPLATES)
def test_named_function_is_called_once(name: str) -> None:
    form = form_of(name)
    options = AnswerOptions(TOOLS, ToolChoice.NAMED, "stop", one_call=True)
    for seed in range(5):
        walk = Walk(source_of(form, options, are_tokens=True))
        assert walk.feed(CALL if name == "openai" else "")
        walk.go_at_random(random.Random(seed))
        assert calls_of(read(form, options, walk.text)) == [("stop", {})]


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "openai"])
def test_reasoning_may_come_before_forced_calls(name: str, are_tokens: bool) -> None:
    form = form_of(name, reasons=True)
    options = AnswerOptions(TOOLS, ToolChoice.NAMED, "stop", one_call=True)
    for prompt_end, opening in (("", "<think>"), ("<think>\n", "")):
        source = source_of(form, options, are_tokens=are_tokens, prompt_end=prompt_end)
        walk = Walk(source)
        thought = 'I call <function=stop> {"name": "move"}'
        assert walk.feed(f"{opening}\n{thought}\n</think>\n\n")
        assert not walk.matcher.is_accepting()
        walk.go_at_random(random.Random(1))
        events = read(form, options, walk.text, prompt_end)
        assert events[0] == ReasoningDelta(thought)
        assert calls_of(events) == [("stop", {})]


# Template, a call of `stop` with forbidden arguments, and one of `move` that breaks its schema.
WRONG = {
    "hermes": '<tool_call>\n{"name": "move", "arguments": {"to":1',
    "mistral": '[TOOL_CALLS] [{"name": "move", "arguments": {"to":1',
    "mistral args": '[TOOL_CALLS]move[ARGS]{"to":1',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>move<｜tool▁sep｜>{"to":1',
    "qwen3_coder": "<tool_call>\n<function=move>\n<parameter=to>\nabcdefg",
    "llama3_json": '{"name": "move", "parameters": {"to":1',
    "pythonic": "[move(to=1",
    "openai": '<|channel|>commentary to=functions.move <|constrain|>json<|message|>{"to":1',
}


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_strict_tool_holds_calls_in_a_text(name: str, reasons: bool, are_tokens: bool) -> None:
    form = form_of(name, reasons=reasons and name != "openai")
    strict = Tool("move", MOVE, is_strict=True)
    options = AnswerOptions((strict, Tool("any", {"type": "object", "properties": {"a": {}}})))
    source = source_of(form, options, are_tokens=are_tokens)
    walk = Walk(source)
    head = "<|channel|>final<|message|>" if name == "openai" else ""
    assert walk.feed(f"{head}Just a text, with [brackets] and {{}} and <tags>.\n")
    assert walk.matcher.is_accepting()
    wrong = WRONG[name]
    first = wrong[:-1]
    for before in ("", "Sure. ") if name not in ("llama3_json", "pythonic", "openai") else ("",):
        walk = Walk(source)
        assert walk.feed(before + first)
        assert not walk.feed(wrong[-1])
        walk = Walk(source)
        assert walk.feed(before + first)
        walk.go_at_random(random.Random(3))
        calls = calls_of(read(form, options, walk.text))
        assert calls[0][0] == "move"
        check_calls([call for call in calls if call[0] == "move"], (strict,))


def test_text_after_reasoning_may_hold_calls_again() -> None:
    form = form_of("hermes", reasons=True)
    options = AnswerOptions((Tool("move", MOVE, is_strict=True),))
    walk = Walk(source_of(form, options, are_tokens=False))
    call = '<tool_call>\n{"name": "move", "arguments": {"to":"a","steps":[]}}\n</tool_call>'
    assert walk.feed(f"<think>no <tool_call> yet</think>\n\nFirst {call} then {call}\nDone.")
    assert walk.matcher.is_accepting()
    assert len(calls_of(read(form, options, walk.text))) == 2
    assert not walk.feed("<tool_call>\n{}")


def test_allowed_tools_are_the_only_ones_to_be_called() -> None:
    form = form_of("hermes")
    options = AnswerOptions(TOOLS, allowed=("stop",))
    walk = Walk(source_of(form, options, are_tokens=False))
    assert walk.feed('a <tool_call>\n{"name": "')
    assert not walk.feed("move")
    forced = AnswerOptions(TOOLS, ToolChoice.REQUIRED, allowed=("stop",))
    walk = Walk(source_of(form, forced, are_tokens=False))
    walk.go_at_random(random.Random(1))
    assert {name for name, _ in calls_of(read(form, forced, walk.text))} == {"stop"}


def test_one_call_leaves_no_room_for_a_second() -> None:
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    for one_call in (False, True):
        options = AnswerOptions(TOOLS, ToolChoice.REQUIRED, one_call=one_call)
        walk = Walk(source_of(form_of("hermes"), options, are_tokens=False))
        assert walk.feed(call)
        assert walk.feed(f"\n{call}") != one_call


def test_options_without_constraint_need_no_grammar() -> None:
    for options in (AnswerOptions(TOOLS), AnswerOptions(choice=ToolChoice.NONE)):
        assert answer_grammar(options, form_of("hermes"), "", {}) is None


@pytest.mark.parametrize(
    ("name", "schema", "path"),
    [
        ("pythonic", {"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ("pythonic", {"properties": {"a-b": {}}}, "properties.a-b"),
        ("qwen3_coder", {"$ref": "#/$defs/a", "$defs": {"a": {}}}, "$ref"),
        (
            "qwen3_coder",
            {"properties": {"a": {"type": "string", "pattern": "x"}}},
            "properties.a.pattern",
        ),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "const": 5}}}, "properties.a"),
        ("qwen3_coder", {"properties": {"a": {"items": {"$ref": "#"}}}}, "properties.a"),
        ("pythonic", {"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "properties.a"),
        ("pythonic", {"properties": {}, "$defs": {"a": {"items": {"$ref": "#"}}}}, "$defs"),
    ],
)
def test_schema_beyond_a_familys_form_is_refused(
    name: str, schema: dict[str, Any], path: str
) -> None:
    tool = Tool("f", schema, param="tools[0].function.parameters")
    with pytest.raises(ApiError) as caught:
        source_of(form_of(name), AnswerOptions((tool,), ToolChoice.REQUIRED), are_tokens=False)
    assert caught.value.param == f"tools[0].function.parameters.{path}"
    assert caught.value.mapping.status == 400
    source_of(form_of("hermes"), AnswerOptions((tool,), ToolChoice.REQUIRED), are_tokens=False)


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder"])
def test_definitions_of_every_property_have_a_limit(name: str) -> None:
    """Each property is written on its own with all definitions: these would be 180 MB."""
    properties: dict[str, Any] = {f"p{place}": {} for place in range(3000)}
    schema = {"properties": properties, "$defs": {"a": {"description": "x" * 60_000}}}
    options = AnswerOptions((Tool("f", schema),), ToolChoice.REQUIRED)
    with pytest.raises(ApiError, match="more than 1048576 bytes") as caught:
        source_of(form_of(name), options, are_tokens=False)
    assert (caught.value.param, caught.value.mapping.status) == ("tool_choice", 400)


def test_every_family_has_a_template_here() -> None:
    assert {form_of(name).family_name for name in TEMPLATES} == set(FAMILIES)
