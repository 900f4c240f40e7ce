"""JSON schemas of answers and of the events of streams. Data only; a test validates real answers against them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelswarm_gateway.api.openapi.request_schemas import PLACE
from modelswarm_gateway.errors import Code

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
LOGPROB: Schema = {"type": ["number", "null"]}


def either_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def refer(name: str) -> Schema:
    return {"$ref": f"{PLACE}{name}"}


def list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def has(fields: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object with these fields and no others."""
    properties = {**fields, **(optional or {})}
    return {
        "type": "object",
        "properties": properties,
        "required": list(fields),
        "additionalProperties": False,
    }


def _choice(output: Mapping[str, Schema], logprobs: str, finish: Schema, **more: Schema) -> Schema:
    fields = {"index": WHOLE, **output, "logprobs": either_null(refer(logprobs))}
    return has({**fields, "finish_reason": finish}, {"token_ids": TOKENS, **more})


def _completion(kind: str, choice: Schema, **more: Schema) -> Schema:
    head = {"id": TEXT, "object": {"const": kind}, "created": WHOLE, "model": TEXT}
    return has({**head, "choices": list_of(choice), "usage": refer("Usage")}, more)


def _event(kind: str, choice: Schema, **more: Schema) -> Schema:
    head = {"id": TEXT, "object": {"const": kind}, "created": WHOLE, "model": TEXT}
    usage = {"usage": either_null(refer("Usage"))}
    return has({**head, "choices": list_of(choice)}, {**usage, **more})


ITEM: Schema = {
    "type": "object",
    "properties": {"id": TEXT, "type": TEXT},
    "required": ["id", "type"],
}
OBJECT: Schema = {"type": "object"}
FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
PROMPT_LOGPROBS = list_of(
    either_null({"type": "object", "additionalProperties": refer("PromptLogprob")})
)
PROMPT = {"prompt_token_ids": TOKENS, "prompt_logprobs": PROMPT_LOGPROBS}
_FUNCTION = has({"name": TEXT, "arguments": TEXT})
_CALL = has({"id": TEXT, "type": {"const": "function"}, "function": _FUNCTION})
_CALL_DELTA = has(
    {"index": WHOLE, "function": has({"arguments": TEXT}, {"name": TEXT})},
    {"id": TEXT, "type": {"const": "function"}},
)
_MESSAGE = has(
    {"role": {"const": "assistant"}, "content": either_null(TEXT), "refusal": either_null(TEXT)},
    {"reasoning_content": TEXT, "tool_calls": list_of(_CALL)},
)
_DELTA = has(
    {},
    {
        "role": {"const": "assistant"},
        "content": TEXT,
        "reasoning_content": TEXT,
        "tool_calls": list_of(_CALL_DELTA),
    },
)
_LOGPROB_FIELDS = {"token": TEXT, "logprob": LOGPROB, "bytes": list_of(WHOLE)}
CHAT_LOGPROB = has({**_LOGPROB_FIELDS, "top_logprobs": list_of(has(_LOGPROB_FIELDS))})
_HOP = has({"server": TEXT, "first": WHOLE, "last": WHOLE})
_READINESS = has(
    {
        "model": TEXT,
        "ready": FLAG,
        "missing_blocks": list_of(WHOLE),
        "tokenizer_loaded": FLAG,
        "phase": either_null(TEXT),
        "reason": either_null(TEXT),
        "chat_problem": either_null(TEXT),
    }
)

ANSWERS: dict[str, Schema] = {
    "Error": has(
        {
            "error": has(
                {
                    "message": {**TEXT, "description": "What is wrong, and what to do."},
                    "type": TEXT,
                    "param": {"type": ["string", "null"], "description": "The field or header."},
                    "code": {"enum": [code.value for code in Code]},
                }
            )
        }
    ),
    "Usage": has(
        {"prompt_tokens": WHOLE, "completion_tokens": WHOLE, "total_tokens": WHOLE},
        {
            "prompt_tokens_details": has({"cached_tokens": WHOLE}),
            "completion_tokens_details": has({"reasoning_tokens": WHOLE}),
        },
    ),
    "PromptLogprob": has(
        {"logprob": NUMBER, "rank": {"type": ["integer", "null"]}, "decoded_token": TEXT}
    ),
    "ChatLogprobs": has(
        {
            "content": list_of(CHAT_LOGPROB),
            "refusal": {"type": "null"},
        }
    ),
    "CompletionLogprobs": has(
        {
            "text_offset": list_of(WHOLE),
            "token_logprobs": list_of(LOGPROB),
            "tokens": list_of(TEXT),
            "top_logprobs": list_of(
                either_null({"type": "object", "additionalProperties": NUMBER})
            ),
        }
    ),
    "ChatCompletion": _completion(
        "chat.completion", _choice({"message": _MESSAGE}, "ChatLogprobs", FINISH), **PROMPT
    ),
    "ChatCompletionChunk": _event(
        "chat.completion.chunk",
        _choice({"delta": _DELTA}, "ChatLogprobs", either_null(FINISH)),
        prompt_token_ids=TOKENS,
    ),
    "Completion": _completion(
        "text_completion", _choice({"text": TEXT}, "CompletionLogprobs", FINISH, **PROMPT)
    ),
    "CompletionEvent": _event(
        "text_completion",
        _choice({"text": TEXT}, "CompletionLogprobs", either_null(FINISH), prompt_token_ids=TOKENS),
    ),
    "Tokens": has(
        {
            "count": WHOLE,
            "max_model_len": either_null(WHOLE),
            "tokens": TOKENS,
            "token_strs": either_null(list_of(TEXT)),
        }
    ),
    "Text": has({"prompt": TEXT}),
    "DeletedResponse": has(
        {"id": TEXT, "object": {"const": "response"}, "deleted": {"const": True}}
    ),
    "InputItems": has(
        {
            "object": {"const": "list"},
            "data": list_of(ITEM),
            "first_id": either_null(TEXT),
            "last_id": either_null(TEXT),
            "has_more": FLAG,
        }
    ),
    "Model": has(
        {
            "id": TEXT,
            "object": {"const": "model"},
            "created": WHOLE,
            "owned_by": TEXT,
            "root": TEXT,
            "parent": either_null(TEXT),
            "max_model_len": either_null(WHOLE),
            "vocab_size": either_null(WHOLE),
            "ready": FLAG,
            "chat": {"type": ["boolean", "null"]},
            "chat_problem": either_null(TEXT),
        }
    ),
    "Models": has({"object": {"const": "list"}, "data": list_of(refer("Model"))}),
    "Session": has(
        {
            "id": TEXT,
            "object": {"const": "session"},
            "model": TEXT,
            "state": TEXT,
            "position": WHOLE,
            "max_length": either_null(WHOLE),
            "ttl": either_null(WHOLE),
            "expires_at": either_null(WHOLE),
            "epoch": WHOLE,
            "reroutes": WHOLE,
            "route": list_of(_HOP),
        }
    ),
    "ClosedSession": has({"id": TEXT, "object": {"const": "session"}, "deleted": {"const": True}}),
    "Health": has({"status": {"const": "ok"}}),
    "Readiness": has({"ready": FLAG, "reason": either_null(TEXT), "models": list_of(_READINESS)}),
    "Version": has(
        {
            "version": TEXT,
            "protocol": TEXT,
            "grpc_port": either_null(WHOLE),
            "admin_port": either_null(WHOLE),
        }
    ),
    "Document": {"type": "object", "description": "This document."},
}
