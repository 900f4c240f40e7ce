"""Checks the tool calls in messages and their answers, which belong together by their ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from modelswarm_gateway.api.fields.tools import CALLED_FUNCTION, TOOL_CALL
from modelswarm_gateway.api.tools.objects import check_type, read_object, read_text
from modelswarm_gateway.errors import ApiError, invalid_request, shorten


def read_tool_calls(path: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message, in OpenAI's shape. Raise ApiError."""
    calls = []
    seen = set()
    for place, value in enumerate(values):
        here = f"{path}[{place}]"
        fields = read_object(here, value, TOOL_CALL)
        check_type(here, fields)
        name = read_text(here, fields, "id")
        if name in seen:
            raise invalid_request(
                f"{here}.id", f"{here}.id: two calls have the id {shorten(name)!r}"
            )
        seen.add(name)
        function = read_object(f"{here}.function", fields.get("function"), CALLED_FUNCTION)
        called = read_text(f"{here}.function", function, "name")
        arguments = function.get("arguments", "")
        if not isinstance(arguments, str):
            place_of = f"{here}.function.arguments"
            raise invalid_request(place_of, f"{place_of}: must be a string of JSON")
        content = {"name": called, "arguments": arguments}
        calls.append({"id": name, "type": "function", "function": content})
    return calls


def check_conversation(messages: Sequence[Mapping[str, Any]], *, is_appended: bool) -> None:
    """Raise ApiError unless each call is answered once, right behind its message, as OpenAI demands.

    Appended messages may begin with answers: their calls are in the session's log.
    """
    open_calls: Counter[str] = Counter()  # a list would take quadratic time
    caller, is_first = 0, is_appended
    for place, message in enumerate(messages):
        path = f"messages[{place}]"
        if message["role"] == "tool":
            answered = message.get("tool_call_id")
            path = f"{path}.tool_call_id"
            if not answered:
                raise invalid_request(path, f"{path}: this field is required")
            if is_first:
                continue
            if answered not in open_calls:
                detail = "is no open call of the assistant's message before it"
                raise invalid_request(path, f"{path}: {shorten(str(answered))!r} {detail}")
            open_calls[answered] -= 1
            if not open_calls[answered]:
                del open_calls[answered]
            continue
        is_first = False
        if open_calls:
            break
        if message.get("tool_call_id") is not None:
            raise _misplaced(f"{path}.tool_call_id", "tool")
        calls = message.get("tool_calls")
        if calls and message["role"] != "assistant":
            raise _misplaced(f"{path}.tool_calls", "assistant")
        open_calls, caller = Counter(call["id"] for call in calls or ()), place
    if open_calls:
        path = f"messages[{caller}].tool_calls"
        detail = f"no message with role tool answers the call {shorten(next(iter(open_calls)))!r}"
        raise invalid_request(path, f"{path}: {detail}; add one right after it")


def _misplaced(path: str, role: str) -> ApiError:
    return invalid_request(path, f"{path}: only a message with role {role} has this field")
