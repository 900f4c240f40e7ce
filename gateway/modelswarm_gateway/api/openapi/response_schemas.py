"""JSON schemas of OpenAI's response object, its output items, and the events of its stream. Data only."""

from __future__ import annotations

from modelswarm_gateway.api.openapi.answer_schemas import (
    CHAT_LOGPROB,
    FLAG,
    NUMBER,
    OBJECT,
    TEXT,
    WHOLE,
    Schema,
    either_null,
    has,
    list_of,
    refer,
)
from modelswarm_gateway.errors import Code

_LOGPROBS = list_of(CHAT_LOGPROB)
_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}
_USAGE = has(
    {
        "input_tokens": WHOLE,
        "input_tokens_details": has({"cached_tokens": WHOLE, "cache_write_tokens": {"const": 0}}),
        "output_tokens": WHOLE,
        "output_tokens_details": has({"reasoning_tokens": WHOLE}),
        "total_tokens": WHOLE,
    }
)
_RESPONSE: dict[str, Schema] = {
    "id": TEXT,
    "object": {"const": "response"},
    "created_at": WHOLE,
    "status": {"enum": ["in_progress", "completed", "incomplete"]},
    "background": {"const": False},
    "completed_at": either_null(WHOLE),
    "error": {"type": "null"},
    "incomplete_details": either_null(has({"reason": {"const": "max_output_tokens"}})),
    "instructions": either_null(TEXT),
    "max_output_tokens": either_null(WHOLE),
    "max_tool_calls": {"type": "null"},
    "metadata": OBJECT,
    "model": TEXT,
    "output": list_of(refer("OutputItem")),
    "parallel_tool_calls": FLAG,
    "previous_response_id": either_null(TEXT),
    "reasoning": has({"effort": either_null(TEXT), "summary": {"type": "null"}}),
    "service_tier": {"const": "default"},
    "store": FLAG,
    "temperature": NUMBER,
    "text": OBJECT,
    "tool_choice": {"type": ["string", "object"]},
    "tools": list_of(OBJECT),
    "top_logprobs": WHOLE,
    "top_p": NUMBER,
    "truncation": {"const": "disabled"},
    "usage": either_null(_USAGE),
}
_TEXT_PART = has(
    {
        "type": {"const": "output_text"},
        "text": TEXT,
        "annotations": {"const": []},
        "logprobs": _LOGPROBS,
    }
)
_REASONING_PART = has({"type": {"const": "reasoning_text"}, "text": TEXT})


def _item(kind: str, **fields: Schema) -> Schema:
    return has({"id": TEXT, "type": {"const": kind}, "status": _STATUS, **fields})


def _event(*names: str, **fields: Schema) -> Schema:
    kinds = [f"response.{name}" for name in names]
    return has({"type": {"enum": kinds}, "sequence_number": WHOLE, **fields})


_OF_OUTPUT = {"output_index": WHOLE}
_OF_ITEM = {**_OF_OUTPUT, "item_id": TEXT}
_OF_PART = {**_OF_ITEM, "content_index": WHOLE}
_PART: Schema = {"anyOf": [_TEXT_PART, _REASONING_PART]}
_ERROR: dict[str, Schema] = {
    "code": {"enum": [code.value for code in Code]},
    "message": TEXT,
    "param": either_null(TEXT),
}

RESPONSE_ANSWERS: dict[str, Schema] = {
    "Response": has(_RESPONSE),
    "OutputItem": {
        "anyOf": [
            _item("message", role={"const": "assistant"}, content=list_of(_TEXT_PART)),
            _item("reasoning", summary={"const": []}, content=list_of(_REASONING_PART)),
            _item("function_call", call_id=TEXT, name=TEXT, arguments=TEXT),
        ]
    },
    "ResponseEvent": {
        "anyOf": [
            _event("created", "in_progress", response=refer("Response")),
            _event("completed", "incomplete", response=refer("Response")),
            _event("output_item.added", "output_item.done", item=refer("OutputItem"), **_OF_OUTPUT),
            _event("content_part.added", "content_part.done", part=_PART, **_OF_PART),
            _event("output_text.delta", delta=TEXT, logprobs=_LOGPROBS, **_OF_PART),
            _event("output_text.done", text=TEXT, logprobs=_LOGPROBS, **_OF_PART),
            _event("reasoning_text.delta", delta=TEXT, **_OF_PART),
            _event("reasoning_text.done", text=TEXT, **_OF_PART),
            _event("function_call_arguments.delta", delta=TEXT, **_OF_ITEM),
            _event("function_call_arguments.done", name=TEXT, arguments=TEXT, **_OF_ITEM),
            has(
                {
                    "type": {"const": "error"},
                    "sequence_number": WHOLE,
                    "error": has({**_ERROR, "type": TEXT}),
                    **_ERROR,
                }
            ),
        ]
    },
}
