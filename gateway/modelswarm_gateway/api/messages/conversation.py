"""Reads the messages of Anthropic's requests, whose content is a list of blocks, as OpenAI's messages.

The model's chat template takes those. A tool_result block becomes a message of role `tool`; tool_use and thinking
blocks become fields of their message. As Anthropic does, neighbouring messages of one role are joined.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from modelswarm_gateway.api.fields.messages import (
    INPUT_MESSAGE,
    TEXT_BLOCK,
    THINKING_BLOCK,
    TOOL_RESULT_BLOCK,
    TOOL_USE_BLOCK,
)
from modelswarm_gateway.api.fields.states import FieldTable
from modelswarm_gateway.api.tools.objects import read_object, read_text
from modelswarm_gateway.errors import ApiError, Code, invalid_field, invalid_request, shorten

_JOINT = "\n"  # between two texts of one message
# Role -> the blocks that its messages may have.
_BLOCKS: dict[str, dict[str, FieldTable]] = {
    "user": {"text": TEXT_BLOCK, "tool_result": TOOL_RESULT_BLOCK},
    "assistant": {"text": TEXT_BLOCK, "tool_use": TOOL_USE_BLOCK, "thinking": THINKING_BLOCK},
    "system": {"text": TEXT_BLOCK},
}
_KNOWN = ("text", "tool_use", "tool_result", "thinking")
_RESULT = {"text": TEXT_BLOCK}


def read_conversation(system: object, values: Sequence[object]) -> list[dict[str, Any]]:
    """Return the messages for the chat template. If the last one is the assistant's, the answer continues its text.

    Raise ApiError.
    """
    conversation = _Conversation()
    if system is not None and (text := _text("system", system, _BLOCKS["system"])):
        conversation.add_text("system", text)
    for place, value in enumerate(values):
        conversation.add_message(f"messages[{place}]", value)
    return conversation.join_messages()


class _Conversation:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._open: dict[str, str] = {}  # id of a call without a result -> its path
        self._path = ""  # of the last message

    def add_message(self, path: str, value: object) -> None:
        fields = read_object(path, value, INPUT_MESSAGE)
        role = read_text(path, fields, "role")
        if role not in _BLOCKS:
            detail = 'must be "user", "assistant" or "system"'
            raise invalid_request(f"{path}.role", f"{path}.role: {detail}, not {shorten(role)!r}")
        if "content" not in fields:
            raise invalid_request(f"{path}.content", f"{path}.content: this field is required")
        self._path = path
        blocks = _read_blocks(f"{path}.content", fields["content"], _BLOCKS[role])
        if not blocks and role != "assistant":
            path = f"{path}.content"
            raise invalid_request(path, f"{path}: the list is empty; at least one block is needed")
        last = self.messages[-1]["role"] if self.messages else ""
        if role == "system" or (role == "assistant" and last != role):
            self._check_answered()
        if role == "assistant":
            self._add_assistant(blocks)
            return
        for place, block in blocks:
            if block["type"] == "tool_result":
                self._add_result(place, block)
            else:
                self._check_answered()
                self.add_text(role, read_block_text(place, block))

    def add_text(self, role: str, text: str) -> None:
        """Add a text to the last message if it has this role, else as a message."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != role:
            self.messages.append(last := {"role": role, "content": []})
        last["content"].append(text)

    def join_messages(self) -> list[dict[str, Any]]:
        """Return the messages. Raise ApiError if no answer can follow the last one."""
        self._check_answered()
        for message in self.messages:
            if message["role"] != "tool":  # joined once, not with each of a million blocks
                message["content"] = _JOINT.join(filter(None, message["content"]))
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
        self._check_end()
        return self.messages

    def _check_end(self) -> None:
        """Raise ApiError if the last message is one of the assistant that no answer can continue."""
        last = self.messages[-1]
        if last["role"] != "assistant":
            return
        path = f"{self._path}.content"
        if not last["content"].strip():
            detail = (
                "the answer continues this message, which has no text; end with one of the user"
            )
            raise invalid_field(path, detail)
        if last["content"] != last["content"].rstrip():
            detail = "the answer continues this text, which must not end with white space"
            raise invalid_field(path, detail)

    def _add_assistant(self, blocks: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.add_text("assistant", "")
        message = self.messages[-1]
        for place, block in blocks:
            match block["type"]:
                case "text":
                    self.add_text("assistant", read_block_text(place, block))
                case "thinking":
                    # Anthropic leaves the text of reasoning out, unless display is "summarized".
                    if thought := read_block_text(place, block, "thinking"):
                        message.setdefault("reasoning_content", []).append(thought)
                case _:
                    message.setdefault("tool_calls", []).append(self._read_call(place, block))

    def _read_call(self, path: str, block: dict[str, Any]) -> dict[str, Any]:
        call, name = read_text(path, block, "id"), read_text(path, block, "name")
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise invalid_request(f"{path}.input", f"{path}.input: must be an object")
        if call in self._open:
            detail = f"two blocks have the id {shorten(call)!r}"
            raise invalid_request(f"{path}.id", f"{path}.id: {detail}")
        self._open[call] = path
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": call, "type": "function", "function": function}

    def _add_result(self, path: str, block: dict[str, Any]) -> None:
        call = read_text(path, block, "tool_use_id")
        if self._open.pop(call, None) is None:
            detail = (
                f"{shorten(call)!r} is no tool_use block without a result of the message before it"
            )
            raise invalid_request(f"{path}.tool_use_id", f"{path}.tool_use_id: {detail}")
        content = block.get("content")
        text = "" if content is None else _text(f"{path}.content", content, _RESULT)
        self.messages.append({"role": "tool", "content": text, "tool_call_id": call})

    def _check_answered(self) -> None:
        """Raise ApiError if a call has no result, which must begin the user's message behind it."""
        if self._open:  # a loop would visit the places of all calls that were answered
            call, path = next(iter(self._open.items()))
            detail = f"no tool_result block begins the next message for the call {shorten(call)!r}; add one"
            raise invalid_field(path, detail)


def _read_blocks(
    path: str, content: object, tables: dict[str, FieldTable]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the blocks with their paths. A string is one text block."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise invalid_request(path, f"{path}: must be a string, or a list of blocks")
    return [
        (f"{path}[{place}]", _read_block(f"{path}[{place}]", block, tables))
        for place, block in enumerate(content)
    ]


def _read_block(path: str, value: object, tables: dict[str, FieldTable]) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in tables:
        path = f"{path}.type"
        allowed = ", ".join(tables)
        if kind in _KNOWN:
            raise invalid_request(path, f"{path}: {kind} does not belong here; allowed: {allowed}")
        detail = f"{shorten(kind)} blocks are not supported; allowed: {allowed}"
        raise ApiError(Code.UNSUPPORTED, f"{path}: {detail}", param=path)
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise invalid_request(path, f"{path}: must be an object with a type")
    return read_object(path, value, tables[kind])


def read_block_text(path: str, block: dict[str, Any], name: str = "text") -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise invalid_field(f"{path}.{name}", "must be a string")
    return text


def _text(path: str, content: object, tables: dict[str, FieldTable]) -> str:
    """Return the text of a content that may have nothing but text."""
    blocks = _read_blocks(path, content, tables)
    return _JOINT.join(read_block_text(place, block) for place, block in blocks)
