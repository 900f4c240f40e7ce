"""Typed pieces of an answer: text, reasoning, and tool calls whose arguments arrive in fragments.

Made by the parsers, carried by a generation's chunks, written by the APIs in their own formats. Knows no API.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The begin of a call. `id` is empty until the generation has set it."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A fragment of a call's arguments, which are JSON text as a whole."""

    index: int
    text: str


OutputEvent: TypeAlias = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


def merge_events(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Return the events with neighbours of one kind as one event: the form that does not depend on the pieces."""
    merged: list[OutputEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            merged[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            merged[-1] = ReasoningDelta(last.text + event.text)
        elif (
            isinstance(event, ToolCallArguments)
            and isinstance(last, ToolCallArguments)
            and last.index == event.index
        ):
            merged[-1] = ToolCallArguments(last.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
