"""Writes typed events of an answer as OpenAI's deltas and messages. Used by the chat's response builder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_events,
)


def chat_delta(events: Iterable[OutputEvent]) -> dict[str, Any]:
    """Return one delta with all events: a call's name comes with its first entry, its arguments are fragments."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case TextDelta(text):
                delta["content"] = delta.get("content", "") + text
            case ReasoningDelta(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case ToolCallStart(index, name, call_id):
                function = {"name": name, "arguments": ""}
                calls[index] = {
                    "index": index, "id": call_id, "type": "function", "function": function,
                }  # fmt: skip
            case ToolCallArguments(index, text):
                entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def chat_message(events: Iterable[OutputEvent]) -> dict[str, Any]:
    """Return the whole message. Its content is null if it has calls and no text."""
    delta = chat_delta(merge_events(events))
    calls = delta.pop("tool_calls", [])
    content = delta.pop("content", None if calls else "")
    message = {"role": "assistant", "content": content, "refusal": None, **delta}
    if calls:
        order = ("id", "type", "function")
        message["tool_calls"] = [{name: call[name] for name in order} for call in calls]
    return message
