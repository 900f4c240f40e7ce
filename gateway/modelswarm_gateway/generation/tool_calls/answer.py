"""The answer of one chat as typed events: its parser, the ids of its calls, and its reasoning tokens.

Made by a generation for each turn. The events are a pure function of the request and the turn's tokens. So a stream
that is resumed, or continued by another gateway, gets the same events and ids.
"""

from __future__ import annotations

import enum
import hashlib
import re
import string
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    ReasoningDelta,
    ToolCallStart,
)
from modelswarm_gateway.generation.tool_calls.families import ChatFormat
from modelswarm_gateway.generation.tool_calls.reader import THINK, OutputReader
from modelswarm_gateway.generation.tool_calls.tool import Tool

# Tokens at the prompt's end that are searched for an opened reasoning.
PROMPT_END_TOKENS = 16
_OPENED = re.compile(rf"{re.escape(THINK)}\s*\Z")
_LETTERS = string.digits + string.ascii_letters


class ToolChoice(enum.Enum):
    """The values of `tool_choice`; NAMED stands for an object with a function's name."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "function"


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options of a chat request for its answer."""

    tools: tuple[Tool, ...] = ()  # that the model may call
    choice: ToolChoice = ToolChoice.AUTO
    name: str = ""  # of the chosen function
    one_call: bool = False  # the answer ends behind its first call
    include_reasoning: bool = True
    allowed: tuple[str, ...] = ()  # names of the tools that may be called; empty: all
    has_format: bool = False  # the answer is calls, or content that follows a grammar

    @property
    def must_call(self) -> bool:
        """Return whether the answer is nothing but calls, apart from its reasoning."""
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Return the tools that the answer may call; the prompt shows the others too."""
        names = (self.name,) if self.choice is ToolChoice.NAMED else self.allowed
        return tuple(tool for tool in self.tools if not names or tool.name in names)

    @property
    def is_constrained(self) -> bool:
        """Return whether a grammar has to hold the answer to these options."""
        if not self.tools:
            return False
        return self.must_call or bool(self.allowed) or any(t.is_strict for t in self.callable_tools)

    def follows_schema(self, tool: Tool) -> bool:
        """Return whether the arguments of a call are held to the tool's schema."""
        return self.must_call or tool.is_strict


def opens_reasoning(prompt_end: str) -> bool:
    """Return whether a prompt that ends so has opened the reasoning."""
    return _OPENED.search(prompt_end) is not None


def check_answer(options: AnswerOptions, form: ChatFormat) -> None:
    """Raise ApiError if a model of this format cannot answer so."""
    if not options.tools:
        return
    if form.refusal:
        raise ApiError(Code.UNSUPPORTED, f"tools: {form.refusal}", param="tools")


def has_events(options: AnswerOptions | None, form: ChatFormat) -> bool:
    """Return whether the answer is more than its text."""
    return options is not None and bool(options.tools or form.has_reasoning or form.is_harmony)


class AnswerParser:
    def __init__(
        self,
        options: AnswerOptions,
        form: ChatFormat,
        prompt: Sequence[int],
        prompt_end: str,
        seed: int,
    ) -> None:
        """`prompt_end`: the text of the prompt's last tokens. `seed`: of the turn's sampling."""
        self._options, self._form = options, form
        is_parsed = form.family is not None and (bool(options.tools) or form.is_harmony)
        reader = form.family.reader if form.family and is_parsed else OutputReader
        self._reader = reader(
            {tool.name: tool for tool in options.callable_tools},
            has_reasoning=form.has_reasoning,
            is_thinking=form.has_reasoning and opens_reasoning(prompt_end),
            one_call=options.one_call,
            has_format=options.has_format,
        )
        self._prompt, self._seed = prompt, seed & (1 << 64) - 1
        self.reasoning_tokens = 0

    @property
    def has_ended(self) -> bool:
        """Return whether later text is ignored, because the one call is over."""
        return self._reader.has_ended

    @property
    def has_calls(self) -> bool:
        return self._reader.calls > 0

    def add_token(self, position: int, text: str, *, is_last: bool) -> list[OutputEvent]:
        """Return the events that a token makes visible. `position`: its place in the log."""
        was_reasoning = self._reader.is_reasoning
        events = self._reader.feed(text)
        if is_last:
            events += self._reader.finish()
        self.reasoning_tokens += was_reasoning or self._reader.is_reasoning
        return [
            self._with_id(event, position)
            for event in events
            if self._options.include_reasoning or not isinstance(event, ReasoningDelta)
        ]

    def _with_id(self, event: OutputEvent, position: int) -> OutputEvent:
        if not isinstance(event, ToolCallStart):
            return event
        assert self._form.family is not None
        digest = hashlib.blake2s(struct.pack(f"<{len(self._prompt)}I", *self._prompt))
        digest.update(struct.pack("<QQI", self._seed, position, event.index))
        number = int.from_bytes(digest.digest())
        letters = ""
        for _ in range(self._form.family.id_length):
            number, place = divmod(number, len(_LETTERS))
            letters += _LETTERS[place]
        return replace(event, id=self._form.family.id_prefix + letters)
