"""Base of the parsers: reads a model's text that arrives in pieces, and makes typed events of it.

A family's parser is one generator that asks for characters and is suspended while they have not arrived. The events
are a pure function of the text. Neither cuts between pieces nor later text change what was shown: text that may still
become a marker or a call is withheld. Text that is no valid call of a declared tool is shown as text, unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_events,
)
from modelswarm_gateway.generation.tool_calls.tool import Tool

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], None]

# White space withheld because a call may follow, in characters.
MAX_WITHHELD_SPACE = 256
# Characters of a name; a longer one belongs to no declared tool.
MAX_NAME = 256
THINK, END_THINK = "<think>", "</think>"


class OutputReader:
    """Reads plain text, after the reasoning if the family has any. Subclasses read tool calls."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        has_reasoning: bool = False,
        is_thinking: bool = False,
        one_call: bool = False,
        has_format: bool = False,
    ) -> None:
        """`is_thinking`: the prompt has opened the reasoning. `one_call`: the text ends behind the first call.

        `has_format`: a text that does not begin with a call has none.
        """
        self._tools, self._one_call, self._has_format = tools, one_call, has_format
        self._has_text = False  # that was shown behind the reasoning
        self._has_reasoning, self._starts_thinking = has_reasoning or is_thinking, is_thinking
        self.is_reasoning = is_thinking
        self.calls = 0  # started
        self.has_ended = False  # the one call is over; later text is ignored
        self._buffer, self._at = "", 0
        self._is_last = False  # no more text arrives
        self._events: list[OutputEvent] = []
        self._space = ""
        self._marked: list[str] | None = None
        self._machine = self._read()
        next(self._machine)

    def feed(self, piece: str) -> list[OutputEvent]:
        """Add text and return the events that it completes."""
        if not piece or self.has_ended:
            return []
        self._buffer, self._at = self._buffer[self._at :] + piece, 0
        return self._advance()

    def finish(self) -> list[OutputEvent]:
        """Return the events of the withheld text: the answer has ended."""
        self._is_last = True
        return [] if self.has_ended else self._advance()

    def _advance(self) -> list[OutputEvent]:
        try:
            next(self._machine)
        except StopIteration:
            self.has_ended = True
        events, self._events = merge_events(self._events), []
        return events

    def _read(self) -> Steps[None]:
        if self._has_reasoning:
            yield from self._read_reasoning()
        yield from self._parse()
        while not self._is_last and not self.has_ended:
            yield
        if self._space and not self.calls:
            self._events.append(TextDelta(self._space))

    def _parse(self) -> Steps[None]:
        """Read the answer behind the reasoning."""
        yield from self._read_text(())

    def _text_before_call(self, *markers: str) -> Steps[str]:
        """Pass on text up to one of the markers of calls, as `_read_text` does."""
        if self._has_format and not self.calls and not (yield from self._begins_with(markers)):
            markers = ()  # the content may spell them
        return (yield from self._read_text(markers))

    def _begins_with(self, markers: Sequence[str]) -> Steps[bool]:
        """Return whether the whole text begins with one of the markers, behind white space."""
        if self._has_text:
            return False
        self._mark()
        yield from self._skip_space()
        for marker in markers:
            if (yield from self._is_next(marker)):
                break
        else:
            self._rewind()
            return False
        self._rewind()
        return True

    def _read_reasoning(self) -> Steps[None]:
        """Read up to the end of the reasoning. White space around it is dropped, as chat templates do."""
        if not self._starts_thinking:
            self._mark()
            yield from self._skip_space()
            if not (yield from self._accept(THINK)):
                return self._rewind()
            self._marked = None
        self.is_reasoning = True
        yield from self._skip_space()
        yield from self._read_text((END_THINK,), self._show_reasoning)
        yield from self._accept(END_THINK)
        self._space, self.is_reasoning = "", False
        yield from self._skip_space()

    # Characters

    def _peek(self) -> Steps[str]:
        """Return the next character; "" at the end of the text."""
        while self._at >= len(self._buffer):
            if self._is_last:
                return ""
            yield
        return self._buffer[self._at]

    def _take(self, count: int = 1) -> str:
        """Return the next characters, which have arrived, and go behind them."""
        taken = self._buffer[self._at : self._at + count]
        self._at += count
        if self._marked is not None:
            self._marked.append(taken)
        return taken

    def _is_next(self, text: str) -> Steps[bool]:
        while True:
            arrived = self._buffer[self._at : self._at + len(text)]
            if arrived == text:
                return True
            if self._is_last or not text.startswith(arrived):
                return False
            yield

    def _accept(self, text: str) -> Steps[bool]:
        """Go behind `text` if it follows."""
        if not (yield from self._is_next(text)):
            return False
        self._take(len(text))
        return True

    def _skip_space(self, more: str = "") -> Steps[None]:
        """Go behind white space, and characters of `more`."""
        while (character := (yield from self._peek())) and (
            character.isspace() or character in more
        ):
            self._take()

    def _name_until(self, end: str) -> Steps[str | None]:
        """Return the text before `end`, and go behind that; None if it is too long for a name."""
        name = ""
        while not (yield from self._accept(end)):
            if len(name) >= MAX_NAME or not (yield from self._peek()):
                return None
            name += self._take()
        return name

    def _identifier(self) -> Steps[str]:
        """Return the letters, digits and `_.-` that follow."""
        name = ""
        while (character := (yield from self._peek())) and len(name) < MAX_NAME:
            if not (character.isalnum() or character in "_.-"):
                break
            name += self._take()
        return name

    def _mark(self) -> None:
        """Record what is read from here on, until a call starts."""
        self._marked = []

    def _rewind(self) -> None:
        """Go back to the mark."""
        self._buffer, self._at = "".join(self._marked or ()) + self._buffer[self._at :], 0
        self._marked = None

    def _show_marked(self) -> None:
        """Show what was read since the mark as text: it is no call."""
        text, self._marked = "".join(self._marked or ()), None
        self._show(text)

    # Events

    def _read_text(self, markers: Sequence[str], sink: Sink | None = None) -> Steps[str]:
        """Pass on text up to one of the markers. Return that marker, not read yet; "" at the end of the text."""
        sink = sink or (self._show if markers else self._show_at_once)
        search = re.compile("|".join(map(re.escape, markers)) if markers else r"(?!)")
        while True:
            found = search.search(self._buffer, self._at)
            end = found.start() if found else len(self._buffer)
            if not found and not self._is_last:
                end -= _partial_marker(self._buffer, self._at, markers)
            if end > self._at:
                sink(self._buffer[self._at : end])
                self._at = end
            if found:
                return found.group()
            if self._is_last:
                return ""
            yield

    def _show_at_once(self, text: str) -> None:
        self._has_text = True
        self._events.append(TextDelta(text))

    def _show(self, text: str) -> None:
        """Show text; withhold white space at its end, which is dropped if a call follows."""
        self._has_text = True
        self._events.extend(map(TextDelta, self._without_space(text)))

    def _show_reasoning(self, text: str) -> None:
        self._events.extend(map(ReasoningDelta, self._without_space(text)))

    def _without_space(self, text: str) -> Sequence[str]:
        text = self._space + text
        kept = max(len(text.rstrip()), len(text) - MAX_WITHHELD_SPACE)
        self._space = text[kept:]
        return (text[:kept],) if kept else ()

    def _start_call(self, name: str) -> bool:
        """Start a call; return False if no such tool is declared."""
        if name not in self._tools:
            return False
        self._marked, self._space = None, ""
        self._events.append(ToolCallStart(self.calls, name))
        self.calls += 1
        return True

    def _add_arguments(self, text: str) -> None:
        """Add a fragment of the last call's arguments."""
        self._events.append(ToolCallArguments(self.calls - 1, text))

    def _end_call(self) -> bool:
        """Return whether the answer ends behind this call."""
        self.has_ended = self._one_call
        return self.has_ended


def _partial_marker(text: str, start: int, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text) - start), 0, -1):
        if any(marker.startswith(text[len(text) - length :]) for marker in markers):
            return length
    return 0
