"""Fields of OpenAI's `POST /v1/responses` and of the objects inside it. Data only."""

from __future__ import annotations

from modelswarm_gateway.api.fields.extensions import NOT_BUILT, TEXT_ONLY
from modelswarm_gateway.api.fields.openai import (
    CALLER,
    ON_OPENAIS_SERVERS,
    ONE_TIER,
    OPENAI_CACHE,
)
from modelswarm_gateway.api.fields.states import OBEYED, FieldTable, NoEffect, refused
from modelswarm_gateway.api.fields.tools import FUNCTIONS_ONLY

OF_ITS_SERVER = NoEffect("the server that wrote the item has set it; models do not read it")
FUNCTION_TOOLS_ONLY = NoEffect("it counts calls of built-in tools, and those are refused")

RESPONSES = FieldTable(
    "POST /v1/responses",
    {
        "OpenAI": {
            "model": OBEYED,
            "input": OBEYED,
            "instructions": OBEYED,
            "max_output_tokens": OBEYED,
            "temperature": OBEYED,
            "top_p": OBEYED,
            "stream": OBEYED,
            "stream_options": OBEYED,
            "tools": OBEYED,
            "tool_choice": OBEYED,
            "parallel_tool_calls": OBEYED,
            "text": OBEYED,
            "reasoning": OBEYED,
            "include": OBEYED,
            "top_logprobs": OBEYED,
            "metadata": OBEYED,
            "store": OBEYED,
            "previous_response_id": OBEYED,
            "background": refused("a response is made while its client waits", False),
            "conversation": refused("use previous_response_id"),
            "prompt": refused("prompts are stored by no server here; send input"),
            "truncation": refused("an input beyond the context is refused", "disabled"),
            "context_management": refused("nothing is compacted", []),
            "max_tool_calls": FUNCTION_TOOLS_ONLY,
            "moderation": refused(ON_OPENAIS_SERVERS),
            "image": refused(TEXT_ONLY),
            "access_programs": refused(ON_OPENAIS_SERVERS, {}),
            "user": CALLER,
            "safety_identifier": CALLER,
            "service_tier": ONE_TIER,
            "prompt_cache_key": OPENAI_CACHE,
            "prompt_cache_options": OPENAI_CACHE,
            "prompt_cache_retention": OPENAI_CACHE,
        },
        "vLLM": {"top_k": OBEYED, "seed": OBEYED, "ignore_eos": OBEYED},
    },
)
STREAM_OPTIONS = FieldTable(
    "stream_options of responses",
    {
        "OpenAI": {
            "include_obfuscation": refused("events are not padded with random text", False),
        },
        "chat completions": {
            "include_usage": refused("the last event always has the usage", True),
        },
    },
)
REASONING = FieldTable(
    "reasoning",
    {
        "OpenAI": {
            "effort": OBEYED,
            "summary": refused("reasoning is shown as it is, without a summary"),
            "generate_summary": refused("reasoning is shown as it is, without a summary"),
            "context": refused("the model's chat template decides it", "auto"),
            "mode": refused(NOT_BUILT, "standard"),
        }
    },
)
TEXT = FieldTable(
    "text of responses",
    {"OpenAI": {"format": OBEYED, "verbosity": refused(NOT_BUILT, "medium")}},
)
TEXT_FORMAT = FieldTable(
    "text.format",
    {
        "OpenAI": {
            "type": OBEYED,
            "name": OBEYED,
            "schema": OBEYED,
            "strict": OBEYED,
            "description": NoEffect("the schema's own descriptions are not shown either"),
        }
    },
)
TOOL = FieldTable(
    "a tool of responses",
    {
        "OpenAI": {
            "type": OBEYED,
            "name": OBEYED,
            "description": OBEYED,
            "parameters": OBEYED,
            "strict": OBEYED,
            "output_schema": refused("it is for calls by programs, which are not supported"),
            "allowed_callers": refused("tools are called by the model", ["direct"]),
            "defer_loading": refused("the model sees all tools", False),
            "async": refused(NOT_BUILT, False),
        }
    },
)
TOOL_CHOICE = FieldTable(
    "tool_choice of responses",
    {
        "OpenAI": {
            "type": OBEYED,
            "name": OBEYED,
            "mode": refused("it needs the type allowed_tools"),
            "tools": refused("it needs the type allowed_tools"),
            "server_label": refused(FUNCTIONS_ONLY),
        }
    },
)
ALLOWED_TOOLS = FieldTable(
    "tool_choice of responses with the type allowed_tools",
    {
        "OpenAI": {
            "type": OBEYED,
            "mode": OBEYED,
            "tools": OBEYED,
            "name": refused("it needs the type function"),
        }
    },
)
MESSAGE = FieldTable(
    "a message of responses",
    {
        "OpenAI": {
            "type": OBEYED,
            "role": OBEYED,
            "content": OBEYED,
            "id": OF_ITS_SERVER,
            "status": OF_ITS_SERVER,
            "phase": OF_ITS_SERVER,
        }
    },
)
PART = FieldTable(
    "a content part of responses",
    {
        "OpenAI": {
            "type": OBEYED,
            "text": OBEYED,
            "refusal": OBEYED,
            "annotations": OF_ITS_SERVER,
            "logprobs": OF_ITS_SERVER,
            "prompt_cache_breakpoint": OPENAI_CACHE,
        }
    },
)
FUNCTION_CALL = FieldTable(
    "a function_call",
    {
        "OpenAI": {
            "type": OBEYED,
            "call_id": OBEYED,
            "name": OBEYED,
            "arguments": OBEYED,
            "id": OF_ITS_SERVER,
            "status": OF_ITS_SERVER,
            "namespace": refused(NOT_BUILT),
            "caller": refused("tools are called by the model", {"type": "direct"}),
            "async": refused(NOT_BUILT, False),
        }
    },
)
FUNCTION_CALL_OUTPUT = FieldTable(
    "a function_call_output",
    {
        "OpenAI": {
            "type": OBEYED,
            "call_id": OBEYED,
            "output": OBEYED,
            "id": OF_ITS_SERVER,
            "status": OF_ITS_SERVER,
            "name": NoEffect("the call that it answers has the name"),
            "namespace": refused(NOT_BUILT),
            "caller": refused("tools are called by the model", {"type": "direct"}),
        }
    },
)
REASONING_ITEM = FieldTable(
    "a reasoning item",
    {
        "OpenAI": {
            "type": OBEYED,
            "content": OBEYED,
            "summary": NoEffect("models read the reasoning itself, which is in content"),
            "encrypted_content": refused("reasoning is never encrypted here; send content"),
            "id": OF_ITS_SERVER,
            "status": OF_ITS_SERVER,
        }
    },
)

TABLES = (
    RESPONSES,
    STREAM_OPTIONS,
    REASONING,
    TEXT,
    TEXT_FORMAT,
    TOOL,
    TOOL_CHOICE,
    ALLOWED_TOOLS,
    MESSAGE,
    PART,
    FUNCTION_CALL,
    FUNCTION_CALL_OUTPUT,
    REASONING_ITEM,
)
_STRING = "a string"
_TEXTS = "a string, or a list of text parts, which are objects"
OWN_WORDS = {
    "input": "a string, or a list of items, which are objects",
    "instructions": _STRING,
    "max_output_tokens": "a whole number from 1",
    "text": 'an object, as {"format": {"type": "text"}}; in a part a string',
    "reasoning": "an object",
    "include": "a list; message.output_text.logprobs adds log probabilities to the text",
    "metadata": "an object of at most 16 strings of up to 512 characters, with names of up to 64",
    "store": "true or false",
    "previous_response_id": "the id of a stored response, a string",
    "effort": _STRING,
    "format": "an object whose type is text, json_object or json_schema",
    "schema": "a JSON schema, which is an object",
    "strict": "true or false",
    "description": _STRING,
    "parameters": "the JSON schema of an object",
    "type": "the kind of the object: message, function_call, function, input_text and the like",
    "content": _TEXTS,
    "mode": "auto or required",
    "call_id": "a string that is not empty",
    "arguments": "a string of JSON",
    "output": _TEXTS,
    "top_logprobs": "a whole number from 0 to 20; needs include with message.output_text.logprobs",
    "tool_choice": "none, auto, required, or an object that names a function",
}
"""Field -> what it may be, where this differs from the same name in chat completions."""
