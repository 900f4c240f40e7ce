"""Answers with a format beside tools or a reasoning: calls or content, and the parser tells which."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from support.models.answer_walks import (
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
from modelswarm_gateway.generation.grammar.source import GrammarKind, GrammarSource
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions, ToolChoice
from modelswarm_gateway.generation.tool_calls.events import ReasoningDelta, TextDelta

# Content that begins like a call of Llama's family.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["move", "stop"]},
        "text": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "text"],
    "additionalProperties": False,
}
JSON = GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), "response_format")
STRICT = tuple(replace(tool, is_strict=True) for tool in TOOLS)
ANSWER = AnswerOptions(STRICT, has_format=True)
CALLS = {
    "openai": "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}",
    "mistral": '[TOOL_CALLS] [{"name": "stop", "arguments": {}}]',
    "mistral args": "[TOOL_CALLS]stop[ARGS]{}",
    "mistral id": "[TOOL_CALLS]stop[CALL_ID]abcdefghi[ARGS]{}",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek block": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "qwen3_coder": "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "pythonic": "[stop()]",
    "llama3_json": '{"name":"stop","parameters":{}}',
}
FINAL = "<|channel|>final<|message|>"


def head_of(name: str) -> str:
    return FINAL if name == "openai" else ""


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_answer_is_calls_or_content_and_never_both(name: str, are_tokens: bool) -> None:
    form = form_of(name)
    source = source_of(form, ANSWER, are_tokens=are_tokens, content=JSON)
    kinds = set[str]()
    for seed in range(8):
        walk = Walk(source)
        assert walk.feed(head_of(name) + '{"')
        walk.go_at_random(random.Random(seed))
        events = read(form, ANSWER, walk.text)
        calls = calls_of(events)
        if name == "llama3_json" and calls:  # its calls begin like the content
            check_calls(calls)
            assert not text_of(events)
            kinds.add("calls")
            continue
        kinds.add("content")
        assert not calls, walk.text
        jsonschema.validate(json.loads(text_of(events)), SCHEMA)
    assert len(kinds) == (2 if name == "llama3_json" else 1)
    walk = Walk(source)
    assert walk.feed(CALLS[name])
    assert walk.matcher.is_accepting()
    events = read(form, ANSWER, walk.text)
    assert (calls_of(events), text_of(events)) == ([("stop", {})], "")
    assert not Walk(source).feed(head_of(name) + "Sure")


@pytest.mark.parametrize("name", TEMPLATES)
def test_content_may_spell_a_call(name: str) -> None:
    """A text that is no token of a marker, and stands within a string, calls nothing."""
    form = form_of(name)
    walk = Walk(source_of(form, ANSWER, are_tokens=False, content=JSON))
    spelled = CALLS[name].replace("\\", "").replace('"', "'").replace("\n", " ")[:40]
    content = json.dumps({"name": "stop", "text": spelled}, separators=(",", ":"))
    content = json.dumps(json.loads(content), separators=(",", ":"), ensure_ascii=False)
    if name != "openai":  # its markers end messages, whose text they cannot be a part of
        assert walk.feed(content)
        assert walk.matcher.is_accepting()
    events = read(form, ANSWER, head_of(name) + content)
    assert (calls_of(events), text_of(events)) == ([], content)


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "openai"])
@pytest.mark.parametrize("has_tools", [False, True])
def test_reasoning_may_come_before_content(name: str, are_tokens: bool, has_tools: bool) -> None:
    form = form_of(name, reasons=True)
    options = AnswerOptions(TOOLS if has_tools else (), has_format=True)
    content = '{"name":"move","text":"<think>"}'
    for prompt_end, opening in (("", "<think>"), ("<think>\n", "")):
        source = source_of(
            form, options, are_tokens=are_tokens, prompt_end=prompt_end, content=JSON
        )
        walk = Walk(source)
        assert walk.feed(f"{opening}\nI think {{}}.\n</think>\n\n")
        assert not walk.matcher.is_accepting()
        assert all(walk.take(byte) for byte in content.encode())
        assert walk.matcher.is_accepting()
        events = read(form, options, walk.text, prompt_end)
        assert events[0] == ReasoningDelta("I think {}.")
        assert (text_of(events), calls_of(events)) == (content, [])
        walk = Walk(source)
        assert all(walk.take(byte) for byte in content.encode())
        assert walk.matcher.is_accepting() == (prompt_end == "")


def test_harmony_content_follows_its_analysis() -> None:
    form = form_of("openai")
    options = AnswerOptions(has_format=True)
    walk = Walk(source_of(form, options, are_tokens=False, content=JSON))
    content = '{"name":"move","text":"<|end|>"}'
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert walk.feed(f"{thought}{FINAL}{content}")
    assert walk.matcher.is_accepting()
    events = read(form, options, walk.text)
    assert events == [ReasoningDelta("Hm."), TextDelta(content)]
    assert not Walk(source_of(form, options, are_tokens=False, content=JSON)).feed("{")


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        (GrammarKind.REGEX, r"a/b\/c\\/[/x]", r"a/b/c\/x", r"a/b\/c"),
        (GrammarKind.REGEX, "a\nb\\\nc", "a\nb\nc", "abc"),
        (GrammarKind.REGEX, "(<|marker_0|>)z", "<z", "<tool_call>z"),
        (GrammarKind.CHOICE, '["yes", "no <b>", "<tool_call>"]', "no <b>", "<tool_call>"),
    ],
)
def test_regex_and_choice_are_formats_too(
    kind: GrammarKind, text: str, good: str, bad: str
) -> None:
    form = form_of("hermes")
    content = GrammarSource(kind, text, "guided")
    for are_tokens in (False, True):
        source = source_of(form, ANSWER, are_tokens=are_tokens, content=content)
        walk = Walk(source)
        assert all(walk.take(byte) for byte in good.encode())
        assert walk.matcher.is_accepting()
        assert text_of(read(form, ANSWER, walk.text)) == good
        walk = Walk(source)
        spelled = all(walk.take(byte) for byte in bad.encode())
        assert not (spelled and walk.matcher.is_accepting())


LIST = GrammarSource(GrammarKind.JSON_SCHEMA, '{"type": "array"}', "guided_json")


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "openai"])
def test_content_may_be_a_list(name: str) -> None:
    form = form_of(name)
    source = source_of(form, ANSWER, are_tokens=False, content=LIST)
    for text in ("[]", "[1,true]", '["<tool_call>"]', '[[{"name":"stop"}]]'):
        walk = Walk(source)
        assert all(walk.take(byte) for byte in text.encode()), text
        assert walk.matcher.is_accepting()
        assert text_of(read(form, ANSWER, text)) == text
    assert Walk(source).feed(CALLS[name])


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "additionalProperties": False, "$ref": "#"},
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {"name": {}, "parameters": {}},
        },
    ],
)
def test_content_that_may_be_a_call_is_refused(schema: dict[str, Any]) -> None:
    content = GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema), "guided_json")
    source_of(form_of("hermes"), ANSWER, are_tokens=False, content=content)
    with pytest.raises(ApiError, match="which this format allows too") as refusal:
        source_of(form_of("llama3_json"), ANSWER, are_tokens=False, content=content)
    assert refusal.value.param == "guided_json"
    spaced = replace(JSON, whitespace=None)
    with pytest.raises(ApiError, match="which this format allows too"):
        source_of(form_of("llama3_json"), ANSWER, are_tokens=False, content=spaced)


def test_forced_calls_leave_no_content() -> None:
    form = form_of("hermes")
    options = AnswerOptions(TOOLS, ToolChoice.REQUIRED, has_format=True)
    source = source_of(form, options, are_tokens=False, content=JSON)
    assert not Walk(source).feed("{")
    assert Walk(source).feed(CALLS["hermes"])
