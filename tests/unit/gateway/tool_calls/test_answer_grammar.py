"""Grammars of answers with tools: what they accept, their family's parser reads as calls that follow the schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.generation.grammar.lark import placeholders
from modelswarm_gateway.generation.grammar.source import GrammarKind, GrammarSource
from modelswarm_gateway.generation.grammar.tool_grammar import answer_grammar
from modelswarm_gateway.generation.grammar.translation import _byte_tokenizer, compile_source
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions, AnswerParser, ToolChoice
from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from modelswarm_gateway.generation.tool_calls.families import FAMILIES, ChatFormat, find_format
from modelswarm_gateway.generation.tool_calls.tool import Tool

MOVE = {
    "type": "object",
    "properties": {
        "to": {"type": "string", "maxLength": 6},
        "mode": {"type": "string", "enum": ["fast", "<slow>"]},
        "steps": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "on": {"type": ["boolean", "null"]},
    },
    "required": ["to", "steps"],
    "additionalProperties": False,
}
TOOLS = (
    Tool("move", MOVE, param="tools[0].function.parameters"),
    Tool("stop", {"type": "object", "properties": {}, "additionalProperties": False}),
)
# Chat templates, of which some families have several.
TEMPLATES = {
    "openai": "{{ tools }}<|channel|><|message|>",
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "mistral args": "{{ tools }}[TOOL_CALLS][ARGS]",
    "mistral id": "{{ tools }}[TOOL_CALLS][CALL_ID][ARGS]",
    "deepseek": "{{ tools }}<｜tool▁calls▁begin｜>",
    "deepseek block": "{{ tools }}<｜tool▁calls▁begin｜>```json",
    "qwen3_coder": "{{ tools }}<tool_call><function=",
    "hermes": "{{ tools }}<tool_call>",
    "pythonic": "{{ tools }}<|python_start|>",
    "llama3_json": "{{ tools }}<|python_tag|>",
}
THINKING = "{# <think></think> #}"
CALL = "<|channel|>commentary to=functions."  # harmony's reasoning has no end at random
_ENDS = set(b'"}])<\n')
_EOS = 256


def form_of(name: str, *, reasons: bool = False) -> ChatFormat:
    return find_format(TEMPLATES[name] + (THINKING if reasons else ""))


def source_of(
    form: ChatFormat, options: AnswerOptions, *, are_tokens: bool, prompt_end: str = ""
) -> GrammarSource:
    """Return the grammar for a model whose markers are tokens, or plain text."""
    special = {marker: 1000 + n for n, marker in enumerate(form.markers)} if are_tokens else {}
    source = answer_grammar(options, form, prompt_end, special)
    assert source is not None
    return source


class Walk:
    """A grammar over bytes and the placeholders of markers, and the text of its tokens."""

    def __init__(self, source: GrammarSource) -> None:
        for part in source.parts:
            compile_source(GrammarKind.JSON_SCHEMA, part.text, "")
        self._markers = [marker for marker, _ in source.tokens]
        grammar = compile_source(source.kind, source.text, "", self._markers)
        names = tuple(placeholders(len(self._markers)))
        self.matcher = LLMatcher(_byte_tokenizer(names), grammar, log_level=0)
        self._content = b""

    @property
    def text(self) -> str:
        return self._content.decode()

    def take(self, token: int) -> bool:
        if not self.matcher.consume_token(token):
            return False
        self._content += (
            bytes([token]) if token < _EOS else self._markers[token - _EOS - 1].encode()
        )
        return True

    def feed(self, text: str) -> bool:
        """Consume a text, in which markers are tokens if they are tokens of the model."""
        while text:
            marker = next((m for m in self._markers if text.startswith(m)), None)
            if marker is not None:
                if not self.take(_EOS + 1 + self._markers.index(marker)):
                    return False
                text = text[len(marker) :]
                continue
            if not all(self.take(byte) for byte in text[0].encode()):
                return False
            text = text[1:]
        return True

    def go_at_random(self, rng: random.Random) -> None:
        """Take random tokens up to an end of the answer; ends of strings and lists are likely."""
        for _ in range(3000):
            bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
            assert not self.matcher.is_error(), self.matcher.get_error()
            allowed = [int(n) for n in np.nonzero(np.unpackbits(bits, bitorder="little"))[0]]
            allowed = [token for token in allowed if token != _EOS]
            if self.matcher.is_accepting() and (not allowed or rng.random() < 0.5):
                return
            ends = [token for token in allowed if token > _EOS or token in _ENDS]
            assert self.take(rng.choice(ends if ends and rng.random() < 0.5 else allowed))
        raise AssertionError(f"the answer has no end: {self.text[:200]!r}")


def read(
    form: ChatFormat, options: AnswerOptions, text: str, prompt_end: str = ""
) -> list[OutputEvent]:
    return AnswerParser(options, form, [1], prompt_end, 0).add_token(0, text, is_last=True)


def calls_of(events: Sequence[OutputEvent]) -> list[tuple[str, Any]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            name, arguments = calls[event.index]
            calls[event.index] = name, arguments + event.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


def check_calls(calls: list[tuple[str, Any]], tools: Sequence[Tool] = TOOLS) -> None:
    by_name = {tool.name: tool.parameters for tool in tools}
    for name, arguments in calls:
        jsonschema.validate(arguments, by_name[name])


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
LEAVES_OUT = {"pythonic": '"a")', "qwen3_coder": "abc\n</parameter>\n</"}


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


def test_every_family_has_a_template_here() -> None:
    assert {form_of(name).family_name for name in TEMPLATES} == set(FAMILIES)
