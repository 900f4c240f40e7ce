"""Random walks through grammars of answers, and the events that parsers make of the texts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher

from modelswarm_gateway.generation.grammar.answer_grammar import answer_grammar
from modelswarm_gateway.generation.grammar.lark import placeholders
from modelswarm_gateway.generation.grammar.source import GrammarSource
from modelswarm_gateway.generation.grammar.translation import _byte_tokenizer, compile_source
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions, AnswerParser
from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    ToolCallArguments,
    ToolCallStart,
)
from modelswarm_gateway.generation.tool_calls.families import ChatFormat, find_format
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
    form: ChatFormat,
    options: AnswerOptions,
    *,
    are_tokens: bool,
    prompt_end: str = "",
    content: GrammarSource | None = None,
) -> GrammarSource:
    """Return the grammar for a model whose markers are tokens, or plain text."""
    special = {marker: 1000 + n for n, marker in enumerate(form.markers)} if are_tokens else {}
    source = answer_grammar(options, form, prompt_end, special, content)
    assert source is not None
    return source


class Walk:
    """A grammar over bytes and the placeholders of markers, and the text of its tokens."""

    def __init__(self, source: GrammarSource) -> None:
        for part in source.parts:
            compile_source(part.kind, part.text, "")
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
