"""Puts tools and tool calls into a prompt as the templates of a family expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from modelswarm_gateway.generation.tool_calls.families import ChatFormat


def template_messages(
    messages: Sequence[Mapping[str, Any]], form: ChatFormat
) -> list[Mapping[str, Any]]:
    """Return the messages with the arguments of calls as mappings, unless the family's templates take text.

    GPT-OSS's template reads the reasoning under a name of its own.
    """
    if form.is_harmony:
        messages = [_with_thinking(message) for message in messages]
    if form.family is not None and form.family.takes_argument_text:
        return list(messages)
    return [_with_mappings(message) if "tool_calls" in message else message for message in messages]


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its reasoning as `thinking`, which the template refuses beside content and calls."""
    reasoning = message.get("reasoning_content")
    if not reasoning or (message.get("tool_calls") and message["content"]):
        return message
    return {**message, "thinking": reasoning}


def _with_mappings(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = _decode(function["arguments"])
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _decode(text: str) -> Any:
    """Return the object that the text has; the text itself if it is none, as of an answer that was cut off."""
    try:
        value = json.loads(text or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
