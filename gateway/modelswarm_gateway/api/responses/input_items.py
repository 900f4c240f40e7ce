"""Reads the items of `input` as the messages of a chat: one list of messages, each with the place of its item.

A function call belongs to the assistant's message before it, and reasoning to the one behind it, as chat templates
expect. Knows neither sessions nor the other fields of a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelswarm_gateway.api.fields.responses import (
    FUNCTION_CALL,
    FUNCTION_CALL_OUTPUT,
    MESSAGE,
    PART,
    REASONING_ITEM,
)
from modelswarm_gateway.api.fields.states import FieldTable, NoEffect
from modelswarm_gateway.api.tools.messages import check_conversation
from modelswarm_gateway.api.tools.objects import read_object, read_text
from modelswarm_gateway.errors import ApiError, Code, invalid_field, invalid_request, shorten

ROLES = ("user", "assistant", "system", "developer")
_ITEMS: Mapping[str, FieldTable] = {
    "message": MESSAGE,
    "function_call": FUNCTION_CALL,
    "function_call_output": FUNCTION_CALL_OUTPUT,
    "reasoning": REASONING_ITEM,
}
_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text")
_MESSAGE_PATH = re.compile(r"messages\[(\d+)\]")


def as_items(value: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return `input` as a list of items, without null, and without values that have no effect: they may be large."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    given = [{name: each for name, each in item.items() if each is not None} for item in value]
    return [_prune(item, _table_of(item), PART) for item in given]


def _table_of(item: Mapping[str, Any]) -> FieldTable | None:
    """Return the fields of an item of this type; None for a type that is not supported."""
    kind = item.get("type", "message")
    return _ITEMS.get(kind) if isinstance(kind, str) else None


def _prune(value: Any, table: FieldTable | None, parts: FieldTable | None = None) -> Any:
    """Return an item, or one of its `parts`. Of its fields without effect only texts are kept, such as the id."""
    if table is None or not isinstance(value, dict):
        return value  # it is refused later
    made: dict[str, Any] = {}
    for name, each in value.items():
        has_effect = not isinstance(table.states.get(name), NoEffect)
        if isinstance(each, list):
            made[name] = [_prune(part, parts) for part in each] if has_effect else []
        elif has_effect or isinstance(each, str):
            made[name] = each
    return made


@dataclass(slots=True)
class _Messages:
    """The messages so far."""

    made: list[dict[str, Any]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of the item of each message
    reasoning: list[str] = field(default_factory=list)  # of the assistant's next message

    def add_message(self, place: int, message: dict[str, Any]) -> None:
        if self.reasoning and message["role"] != "assistant":
            self.add_message(place, {"role": "assistant", "content": ""})
        texts = [message["content"]]
        last = self.made[-1] if self.made else message
        if message["role"] == "assistant" and "tool_calls" in last:
            # An answer may go on behind its calls. It is one message, as in a chat: outputs follow the whole answer.
            last["content"] += texts
        else:
            last = {**message, "content": texts}
            self.made.append(last)
            self.places.append(place)
        if self.reasoning:
            last.setdefault("reasoning_content", []).extend(self.reasoning)
            self.reasoning.clear()

    def add_call(self, place: int, call: dict[str, Any]) -> None:
        last = self.made[-1] if self.made else None
        if last is None or last["role"] != "assistant" or self.reasoning:
            self.add_message(place, {"role": "assistant", "content": ""})
        self.made[-1].setdefault("tool_calls", []).append(call)

    def join_texts(self) -> None:
        """Make one text of the parts of each message: once, because there may be many."""
        for message in self.made:
            for name in ("content", "reasoning_content"):
                if name in message:
                    message[name] = "".join(message[name])


def read_messages(
    items: Sequence[Mapping[str, Any]], *, known: int = 0, is_appended: bool = False
) -> list[dict[str, Any]]:
    """Return the messages of the items. Raise ApiError.

    `known`: items of earlier responses, which come first; errors count the items behind them.
    """
    messages = _Messages()
    for place, item in enumerate(items):
        _add_item(messages, f"input[{place - known}]", place, item)
    if messages.reasoning:
        messages.add_message(len(items) - 1, {"role": "assistant", "content": ""})
    messages.join_texts()
    try:
        check_conversation(messages.made, is_appended=is_appended)
    except ApiError as error:
        raise _at_item(error, messages.places, known) from error
    return messages.made


def _add_item(messages: _Messages, path: str, place: int, item: Mapping[str, Any]) -> None:
    kind = item.get("type", "message")
    table = _table_of(item)
    if table is None:
        allowed = ", ".join(_ITEMS)
        detail = f"{shorten(str(kind))!r} is not supported; allowed: {allowed}"
        raise ApiError(Code.UNSUPPORTED, f"{path}.type: {detail}", param=f"{path}.type")
    fields = read_object(path, dict(item), table)
    match kind:
        case "message":
            messages.add_message(place, _message(path, fields))
        case "function_call":
            arguments = fields.get("arguments")
            if not isinstance(arguments, str):
                here = f"{path}.arguments"
                raise invalid_request(here, f"{here}: must be a string of JSON")
            function = {"name": read_text(path, fields, "name"), "arguments": arguments}
            call_id = read_text(path, fields, "call_id")
            messages.add_call(place, {"id": call_id, "type": "function", "function": function})
        case "function_call_output":
            call_id = read_text(path, fields, "call_id")
            content = _text(f"{path}.output", fields.get("output"), can_be_empty=True)
            messages.add_message(
                place, {"role": "tool", "content": content, "tool_call_id": call_id}
            )
        case "reasoning":
            path = f"{path}.content"
            if text := _text(path, fields.get("content") or [], can_be_empty=True):
                messages.reasoning.append(text)


def _message(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    role = fields.get("role")
    if role not in ROLES:
        raise invalid_request(f"{path}.role", f"{path}.role: must be one of {', '.join(ROLES)}")
    content = _text(f"{path}.content", fields.get("content"))
    return {"role": "system" if role == "developer" else role, "content": content}


def _text(path: str, value: object, *, can_be_empty: bool = False) -> str:
    """Return the text of a string or of a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not (value or can_be_empty):
        detail = "must be a string, or a list of text parts, which are objects"
        raise invalid_field(path, detail)
    return "\n".join(_part(f"{path}[{place}]", part) for place, part in enumerate(value))


def _part(path: str, value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind not in _PARTS:
        detail = f"{shorten(str(kind))!r} is not supported: this server serves text models only"
        allowed = f"allowed: {', '.join(_PARTS)}"
        raise ApiError(Code.UNSUPPORTED, f"{path}.type: {detail}; {allowed}", param=f"{path}.type")
    fields = read_object(path, value, PART)
    name, other = ("refusal", "text") if kind == "refusal" else ("text", "refusal")
    if other in fields:
        raise invalid_field(f"{path}.{other}", f"a part with the type {kind} does not have it")
    text = fields.get(name)
    if not isinstance(text, str):
        raise invalid_request(f"{path}.{name}", f"{path}.{name}: must be a string")
    return text


def _at_item(error: ApiError, places: Sequence[int], known: int) -> ApiError:
    """Return the error with the path of the item in place of the message's."""
    found = _MESSAGE_PATH.match(error.param or "")
    if found is None:
        return error
    place = places[int(found[1])] - known
    path = f"input[{place}]" if place >= 0 else "previous_response_id"
    path += ".call_id" if place >= 0 and "tool_call_id" in str(error.param) else ""
    detail = error.message.removeprefix(f"{error.param}: ")
    detail = detail.replace("message with role tool", "function_call_output")
    detail = detail.replace(
        "the assistant's message before it", "the function_call items before it"
    )
    return invalid_field(path, detail)
