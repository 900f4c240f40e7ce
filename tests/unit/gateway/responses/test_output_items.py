"""Output items and the order of the stream events that show them growing."""

from __future__ import annotations

from typing import Any

from modelswarm_gateway.api.responses.output_items import OutputItems
from modelswarm_gateway.api.responses.response_ids import parse_response_id
from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)

ID = parse_response_id("resp_" + "0" * 64)
ANSWER: list[OutputEvent] = [
    ReasoningDelta("hm"),
    TextDelta("a"),
    TextDelta("b"),
    ToolCallStart(0, "f", "call_1"),
    ToolCallArguments(0, '{"x"'),
    ToolCallArguments(0, ":1}"),
]


def items() -> OutputItems:
    assert ID is not None
    return OutputItems(ID)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_text_has_the_events_of_openai_in_their_order() -> None:
    made = items()
    events = made.add_output([TextDelta("a")]) + made.add_output([TextDelta("b")])
    events += made.finish(is_complete=True)
    assert kinds(events) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert events[0]["item"]["content"] == []
    assert events[1]["part"]["text"] == ""
    assert events[4]["text"] == events[5]["part"]["text"] == "ab"
    assert events[6]["item"] == made.items[0]
    assert made.items[0]["status"] == "completed"


def test_reasoning_text_and_call_are_items_of_their_own() -> None:
    made = items()
    events = made.add_output(ANSWER) + made.finish(is_complete=True)
    assert [item["type"] for item in made.items] == ["reasoning", "message", "function_call"]
    assert kinds(events)[-3:] == [
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert made.items[2]["arguments"] == '{"x":1}'
    assert {event["output_index"] for event in events} == {0, 1, 2}
    assert len({item["id"] for item in made.items}) == 3


def test_pieces_make_the_same_items_as_the_whole() -> None:
    whole, pieces = items(), items()
    whole.add_output(ANSWER)
    for event in ANSWER:
        pieces.add_output([event])
    assert whole.finish(is_complete=False) == pieces.finish(is_complete=False)
    assert whole.items == pieces.items
    assert whole.items[-1]["status"] == "incomplete"


def test_answer_without_anything_is_an_empty_message() -> None:
    made = items()
    assert made.add_output([TextDelta("")]) == []
    events = made.finish(is_complete=True)
    assert kinds(events)[0] == "output_item.added"
    assert made.items[0]["content"][0]["text"] == ""
