"""Typed pieces of an answer: text, reasoning, and tool calls whose arguments arrive in fragments.

Made by the parsers, carried by a generation's chunks, written by the APIs in their own formats. Knows no API.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
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
    """Return the events with neighbours of one kind as one event: the form that does not depend on the pieces.

    Takes time in proportion to the text: a whole answer may have 100,000 pieces.
    """
    merged: list[OutputEvent] = []
    for _, run in groupby(events, key=_kind):
        match list(run):
            case [TextDelta(), _, *_] as pieces:
                merged.append(TextDelta(_joined(pieces)))
            case [ReasoningDelta(), _, *_] as pieces:
                merged.append(ReasoningDelta(_joined(pieces)))
            case [ToolCallArguments(index), _, *_] as pieces:
                merged.append(ToolCallArguments(index, _joined(pieces)))
            case others:
                merged += others
    return merged


def _kind(event: OutputEvent) -> tuple[type, int]:
    """Return what two neighbours share if they are pieces of one event."""
    return type(event), -1 if isinstance(event, TextDelta | ReasoningDelta) else event.index


def _joined(pieces: Sequence[OutputEvent]) -> str:
    return "".join(piece.text for piece in pieces if not isinstance(piece, ToolCallStart))
