"""Events and bodies of a gateway become chunks and answers; anything else is an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelswarm.client.api.answers import (
    Chunk,
    TokenLogprob,
    ToolCall,
    ToolCallPart,
    Usage,
)
from modelswarm.client.api.collecting import Collector
from modelswarm.client.api.events import Event, EventReader
from modelswarm.client.api.parsing import (
    parse_body,
    parse_chunks,
    parse_logprobs,
    parse_models,
    parse_with,
)

USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def events_of(*lines: str) -> list[Event]:
    """Read the lines; check that every cut of their bytes gives the same events."""
    content = "\n".join(lines).encode() + b"\n"
    whole = EventReader().read(content)
    for cut in range(len(content)):
        reader = EventReader()
        assert [*reader.read(content[:cut]), *reader.read(content[cut:])] == whole
    return whole


def test_event_counts_once_its_blank_line_has_come() -> None:
    assert events_of("id: 5-ab", 'data: {"a": 1}', "", "id: 6-ab", "data: cut") == [
        Event(b'{"a": 1}', "5-ab")
    ]


def test_comments_and_other_fields_are_skipped() -> None:
    lines = (": waiting", "id: 1-a", ": waiting", "retry: 5", "data:x", "", "", "data: y", "")
    assert events_of(*lines) == [Event(b"x", "1-a"), Event(b"y", None)]


def test_lines_of_data_are_one_event() -> None:
    assert events_of("data: a", "data: b", "") == [Event(b"a\nb", None)]


def test_lines_end_at_line_feeds_only() -> None:
    assert events_of("data: a\u2028b\x0c\r", "\r") == [Event("a\u2028b\x0c".encode(), None)]


def chunk(choice: dict[str, Any], **event: Any) -> Chunk:
    (made,) = parse_chunks({"choices": [{"index": 0, **choice}], **event})
    return made


def test_chunks_of_texts_and_chats() -> None:
    assert chunk({"text": "a", "finish_reason": None}) == Chunk("a")
    assert chunk({"delta": {"content": "a"}, "token_ids": [5]}) == Chunk("a", token_ids=(5,))
    assert chunk({"delta": {"reasoning_content": "so"}}) == Chunk(reasoning_content="so")
    assert chunk({"delta": {}, "finish_reason": "stop"}) == Chunk(finish_reason="stop")
    assert chunk({"delta": {"role": "assistant", "content": ""}}).is_empty
    assert chunk({"text": "", "prompt_token_ids": [1]}).prompt_token_ids == (1,)
    assert chunk({"delta": {}}, prompt_token_ids=[1]).prompt_token_ids == (1,)
    assert parse_chunks({"choices": [], "usage": USAGE}) == [Chunk(usage=Usage(2, 3, 5))]


def test_both_forms_of_logprobs_are_the_same() -> None:
    entries = (TokenLogprob("a", -0.5, {"a": -0.5, "b": -1.0}), TokenLogprob("c", -2.0))
    in_chat = [
        {"token": "a", "logprob": -0.5, "top_logprobs": [
            {"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.0},
        ]},
        {"token": "c", "logprob": -2.0, "top_logprobs": []},
    ]  # fmt: skip
    in_text = {
        "tokens": ["a", "c"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"a": -0.5, "b": -1.0}, None],
    }
    assert parse_logprobs({"content": in_chat}) == parse_logprobs(in_text) == entries
    assert parse_logprobs(None) is None


def test_collected_chunks_are_the_whole_choice() -> None:
    collector = Collector({"return_token_ids": True, "logprobs": True})
    for each in (
        Chunk(prompt_token_ids=(1, 2)),
        Chunk(reasoning_content="so "),
        Chunk("a", token_ids=(5,), logprobs=(TokenLogprob("a", -1.0),)),
        Chunk(tool_calls=(ToolCallPart(1, "call_b", "g", "{}"),)),
        Chunk(tool_calls=(ToolCallPart(0, "call_a", "f"),)),
        Chunk("b", token_ids=(6, 7), tool_calls=(ToolCallPart(0, arguments='{"x"'),)),
        Chunk(tool_calls=(ToolCallPart(0, arguments=": 1}"),)),
        Chunk(finish_reason="tool_calls"),
        Chunk(usage=Usage(2, 3, 5)),
    ):
        collector.collect(each)
    made = collector.collected()
    assert (made.text, made.token_ids, made.reasoning_content) == ("ab", (5, 6, 7), "so ")
    assert made.tool_calls == (ToolCall("call_a", "f", '{"x": 1}'), ToolCall("call_b", "g", "{}"))
    assert (made.finish_reason, made.prompt_token_ids) == ("tool_calls", (1, 2))
    assert made.logprobs == (TokenLogprob("a", -1.0),) and collector.usage == Usage(2, 3, 5)


def test_whole_body_has_all_choices() -> None:
    message = {
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}],
    }
    body = {
        "model": "m",
        "choices": [
            {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None},
            {"index": 1, "text": "b", "finish_reason": "stop", "token_ids": [3]},
        ],
        "usage": USAGE
        | {
            "completion_tokens_details": {"reasoning_tokens": 1},
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    model, (first, second), usage = parse_body(body)
    assert (model, usage) == ("m", Usage(2, 3, 5, 1, 2))
    assert (first.text, first.tool_calls, first.token_ids) == ("", (ToolCall("c", "f", ""),), None)
    assert (second.text, second.token_ids) == ("b", (3,))


@pytest.mark.parametrize(
    "body", ["", "<html>", "[]", "5", '{"data": 5}', '{"data": [{"name": 1}]}']
)
def test_other_content_is_no_answer_of_a_gateway(body: str) -> None:
    with pytest.raises(ValueError):
        parse_with(parse_models, body)


def test_unknown_fields_of_newer_gateways_are_ignored() -> None:
    body = json.dumps({"data": [{"id": "m", "later": 1}], "more": {}})
    (model,) = parse_with(parse_models, body)
    assert (model.name, model.max_length) == ("m", None)
