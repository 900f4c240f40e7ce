"""Anthropic's messages: the body of a whole one, and the events of a stream in Anthropic's order.

A stream is message_start; for each block content_block_start, deltas and content_block_stop; message_delta with the
stop reason and the usage; message_stop. A ping follows the first start of a block, and is the keepalive.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from modelswarm_gateway.api.http.choices import AnswerBuilder
from modelswarm_gateway.api.http.openai_responses import (
    Events,
    Logprobs,
    ResponseHead,
    Tokens,
)
from modelswarm_gateway.api.messages.partial_json import read_arguments
from modelswarm_gateway.generation.generation import Generation
from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_events,
)

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
# Finish reason of a turn -> Anthropic's stop reason.
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
Block = dict[str, Any]


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


class MessageBuilder(AnswerBuilder):
    def __init__(self, head: ResponseHead, generation: Generation, max_tokens: int) -> None:
        self._head, self._generation, self._max_tokens = head, generation, max_tokens
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks = 0  # that were started
        self._open = ""  # kind of the block that is open; "" without one
        self._finish = ""

    def opening(self) -> bytes:
        return _event("message_start", {"message": self._message([], None, None, 0)})

    def output_event(
        self, output: Events, tokens: Tokens, event_id: str, logprobs: Logprobs = ()
    ) -> bytes:
        return b"".join(self._write(event) for event in output)

    def _write(self, event: OutputEvent) -> bytes:
        match event:
            case TextDelta(""):
                return b""
            case TextDelta(text):
                start = self._start("text", {"type": "text", "text": ""})
                return start + self._delta({"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                start = self._start("thinking", block)
                return start + self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCallStart():
                return self._stop() + self._start("tool_use", _tool_use(event, {}))
            case ToolCallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})

    def _start(self, kind: str, block: Block) -> bytes:
        """Return the start of a block, behind the stop of another kind's; nothing if one of this kind is open."""
        if self._open == kind:
            return b""
        stop = self._stop()
        self._open, index = kind, self._blocks
        self._blocks += 1
        start = _event("content_block_start", {"index": index, "content_block": block})
        return stop + start + (b"" if index else PING)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", {"index": self._blocks - 1, "delta": delta})

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        is_thinking, self._open = self._open == "thinking", ""
        signature = (
            self._delta({"type": "signature_delta", "signature": ""}) if is_thinking else b""
        )
        return signature + _event("content_block_stop", {"index": self._blocks - 1})

    def finish_event(self, finish: str) -> bytes:
        self._finish = finish
        return self._stop()

    def end_events(self, completion: int) -> bytes:
        reason, match = self._stop_reason(completion)
        delta = {"stop_reason": reason, "stop_sequence": match}
        fields = {"delta": delta, "usage": self._usage(completion)}
        return _event("message_delta", fields) + _event("message_stop", {})

    def choice(
        self, output: Events, tokens: Tokens, finish: str, logprobs: Logprobs = ()
    ) -> dict[str, Any]:
        self._finish = finish
        return {"content": _content_blocks(output)}

    def body(self, choices: Sequence[dict[str, Any]], completion: int) -> dict[str, Any]:
        reason, match = self._stop_reason(completion)
        return self._message(choices[0]["content"], reason, match, completion)

    def _stop_reason(self, completion: int) -> tuple[str, str | None]:
        match = self._generation.stop_match
        if match is not None:
            return "stop_sequence", match
        if self._finish == "length" and completion < self._max_tokens:
            return "model_context_window_exceeded", None
        return _STOP_REASONS[self._finish], None

    def _message(
        self, content: list[Block], reason: str | None, match: str | None, completion: int
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": match,
            "usage": self._usage(completion),
        }

    def _usage(self, completion: int) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "input_tokens": len(self._head.prompts[0]),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": completion,
        }
        reasoning = self._head.reasoning_tokens()
        if reasoning is not None:
            counts["output_tokens_details"] = {"thinking_tokens": reasoning}
        return counts


def _tool_use(event: ToolCallStart, arguments: dict[str, Any]) -> Block:
    return {"type": "tool_use", "id": event.id, "name": event.name, "input": arguments}


def _content_blocks(output: Events) -> list[Block]:
    """Return the blocks of a whole answer, as a stream would have them."""
    blocks: list[Block] = []
    arguments = ""
    for event in merge_events(output):
        match event:
            case TextDelta(text) if text:
                blocks.append({"type": "text", "text": text})
            case ReasoningDelta(text):
                blocks.append({"type": "thinking", "thinking": text, "signature": ""})
            case ToolCallStart():
                arguments = ""
                blocks.append(_tool_use(event, {}))
            case ToolCallArguments(_, text):
                arguments += text
                blocks[-1]["input"] = read_arguments(arguments)
    return blocks
