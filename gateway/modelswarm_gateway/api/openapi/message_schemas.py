"""JSON schemas of Anthropic's messages, of the events of their streams, and of their errors. Data only."""

from __future__ import annotations

from modelswarm_gateway.api.openapi.answer_schemas import (
    TEXT,
    WHOLE,
    Schema,
    either_null,
    has,
    list_of,
    refer,
)
from modelswarm_gateway.errors import Code

_OBJECT: Schema = {"type": "object"}
_STOP: Schema = {
    "enum": [
        *("end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"),
        None,
    ]
}
_STOPPED = {"stop_reason": _STOP, "stop_sequence": either_null(TEXT)}


def _kind(name: str, /, **fields: Schema) -> Schema:
    return has({"type": {"const": name}, **fields})


_BLOCK: Schema = {
    "anyOf": [
        _kind("text", text=TEXT),
        _kind("thinking", thinking=TEXT, signature=TEXT),
        _kind("tool_use", id=TEXT, name=TEXT, input=_OBJECT),
    ]
}
_DELTA: Schema = {
    "anyOf": [
        _kind("text_delta", text=TEXT),
        _kind("thinking_delta", thinking=TEXT),
        _kind("signature_delta", signature=TEXT),
        _kind("input_json_delta", partial_json=TEXT),
    ]
}
MESSAGE_ANSWERS: dict[str, Schema] = {
    "MessageUsage": has(
        {
            "input_tokens": WHOLE,
            "cache_creation_input_tokens": {"const": 0},
            "cache_read_input_tokens": {"const": 0},
            "output_tokens": WHOLE,
        },
        {"output_tokens_details": has({"thinking_tokens": WHOLE})},
    ),
    "Message": _kind(
        "message",
        id=TEXT,
        role={"const": "assistant"},
        model=TEXT,
        content=list_of(_BLOCK),
        **_STOPPED,
        usage=refer("MessageUsage"),
    ),
    "MessageEvent": {
        "anyOf": [
            _kind("message_start", message=refer("Message")),
            _kind("content_block_start", index=WHOLE, content_block=_BLOCK),
            _kind("content_block_delta", index=WHOLE, delta=_DELTA),
            _kind("content_block_stop", index=WHOLE),
            _kind("message_delta", delta=has(_STOPPED), usage=refer("MessageUsage")),
            _kind("message_stop"),
            _kind("ping"),
            refer("MessagesError"),
        ]
    },
    "MessagesError": _kind(
        "error",
        error=has(
            {
                "type": TEXT,
                "message": TEXT,
                "param": either_null(TEXT),
                "code": {"enum": [code.value for code in Code]},
            }
        ),
    ),
    "TokenCount": has({"input_tokens": WHOLE}),
    "AnthropicModel": _kind(
        "model",
        id=TEXT,
        display_name=TEXT,
        created_at=TEXT,
        lifecycle={"const": "active"},
        max_input_tokens=either_null(WHOLE),
        max_tokens=either_null(WHOLE),
    ),
    "AnthropicModels": has(
        {
            "data": list_of(refer("AnthropicModel")),
            "has_more": {"const": False},
            "first_id": either_null(TEXT),
            "last_id": either_null(TEXT),
        }
    ),
}
