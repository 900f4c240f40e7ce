"""A whole answer is made of the events of its tokens in linear time: it may have 100,000 of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import override

from modelswarm_gateway.api.grpc.responses import join_parts
from modelswarm_gateway.api.responses.output_items import OutputItems
from modelswarm_gateway.api.responses.response_ids import parse_response_id
from modelswarm_gateway.api.tools.deltas import chat_message
from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_events,
)

PIECES = 1000


class Piece(str):
    """A piece of a text; counts the characters that are copied when it is added to others."""

    __slots__ = ()
    copied = 0

    @override
    def __add__(self, other: str) -> str:
        Piece.copied += len(self) + len(other)
        return str(self) + str(other)

    def __radd__(self, other: str) -> str:
        Piece.copied += len(self) + len(other)
        return other + str(self)


def add_to_items(events: list[OutputEvent]) -> object:
    response_id = parse_response_id("resp_" + "0" * 64)
    assert response_id is not None
    return OutputItems(response_id).add_output(events)


def join_grpc_parts(events: list[OutputEvent]) -> object:
    nothing = {"token_ids": (), "logprobs": (), "prompt_token_ids": (), "prompt_logprobs": ()}
    first = {"id": "a", "position": 1, "mark": "", "usage": None, "finish_reason": ""}
    texts = [event.text for event in events if not isinstance(event, ToolCallStart)]
    parts: Any = [SimpleNamespace(text=text, **first, **nothing) for text in texts]
    return join_parts(parts, 1)


def test_neighbours_of_one_kind_are_one_event() -> None:
    events: list[OutputEvent] = [
        ReasoningDelta("a"), ReasoningDelta("b"), TextDelta("c"), TextDelta("d"), ToolCallStart(0, "f"),
        ToolCallArguments(0, "{"), ToolCallArguments(0, "}"), ToolCallStart(1, "g"), ToolCallStart(2, "h"),
        ToolCallArguments(2, "{}"), TextDelta("e"),
    ]  # fmt: skip
    assert merge_events(events) == [
        ReasoningDelta("ab"), TextDelta("cd"), ToolCallStart(0, "f"), ToolCallArguments(0, "{}"),
        ToolCallStart(1, "g"), ToolCallStart(2, "h"), ToolCallArguments(2, "{}"), TextDelta("e"),
    ]  # fmt: skip
    assert merge_events([]) == []


@pytest.mark.parametrize("use", [merge_events, chat_message, add_to_items, join_grpc_parts])
def test_no_piece_copies_the_text_before_it(use: Callable[[list[OutputEvent]], object]) -> None:
    kinds = (ReasoningDelta, TextDelta, lambda text: ToolCallArguments(0, text))
    parts = [[make(Piece("ab")) for _ in range(PIECES)] for make in kinds]
    Piece.copied = 0
    use([*parts[0], *parts[1], ToolCallStart(0, "f", "call_1"), *parts[2]])
    assert Piece.copied < 100 * PIECES
