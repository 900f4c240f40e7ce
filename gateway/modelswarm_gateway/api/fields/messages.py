"""Fields of Anthropic's requests: `POST /v1/messages`, its count of tokens, and the objects inside them. Data only.

To make a field work, change its state to OBEYED, and read it in `api/messages`.
"""

from __future__ import annotations

from modelswarm_gateway.api.fields.openai import NOTHING_KEPT, ONE_TIER
from modelswarm_gateway.api.fields.states import OBEYED, FieldTable, NoEffect, Section, refused
from modelswarm_gateway.generation.request import MAX_STOP_LENGTH, MAX_STOPS

CACHE = NoEffect(
    "the KV of a prompt is not kept for other requests, whatever Anthropic's cache is told"
)
ON_ANTHROPICS_SERVERS = "it is run by Anthropic's own servers"
_OF_CHAT = "use POST /v1/chat/completions"
_OF_MESSAGES = "it is a field of POST /v1/messages"

_PROMPT: Section = {
    "model": OBEYED,
    "messages": OBEYED,
    "system": OBEYED,
    "tools": OBEYED,
    "tool_choice": OBEYED,
    "thinking": OBEYED,
    "output_config": OBEYED,
    "cache_control": CACHE,
    "speed": refused("there is one speed", "standard"),
    "context_management": refused("messages are never removed from a prompt", {}),
    "mcp_servers": refused(ON_ANTHROPICS_SERVERS, []),
    "output_format": refused("use output_config.format"),
    "billing_policy": refused(ON_ANTHROPICS_SERVERS),
    "compaction": refused("messages are never removed from a prompt", {}),
}
_ANSWER: Section = {
    "max_tokens": OBEYED,
    "stop_sequences": OBEYED,
    "stream": OBEYED,
    "temperature": OBEYED,
    "top_p": OBEYED,
    "top_k": OBEYED,
    "metadata": NOTHING_KEPT,
    "service_tier": ONE_TIER,
    "inference_geo": refused("the gateway does not know where its servers stand"),
    "container": refused(ON_ANTHROPICS_SERVERS),
    "diagnostics": refused(ON_ANTHROPICS_SERVERS),
    "fallbacks": refused("one model answers, the one that is named", []),
    "fallback_credit_token": refused(ON_ANTHROPICS_SERVERS),
    "thread": refused(ON_ANTHROPICS_SERVERS),
}
_OTHER_NAMES: Section = {
    "stop": refused("use stop_sequences", []),
    "max_completion_tokens": refused("use max_tokens"),
    "max_tokens_to_sample": refused("use max_tokens"),
    "n": refused(_OF_CHAT, 1),
    "response_format": refused("use output_config.format", {"type": "text"}),
    "reasoning_effort": refused("use output_config.effort"),
}

MESSAGES = FieldTable(
    "POST /v1/messages",
    {
        "Anthropic": {**_PROMPT, **_ANSWER},
        "OpenAI": {"seed": OBEYED, **_OTHER_NAMES},
        "ModelSwarm": {
            "session_id": refused(_OF_CHAT),
            "append": refused(_OF_CHAT, False),
            "session_position": refused(_OF_CHAT),
        },
    },
)
COUNT_TOKENS = FieldTable(
    "POST /v1/messages/count_tokens",
    {
        "Anthropic": {
            **_PROMPT,
            **{name: refused(_OF_MESSAGES) for name in _ANSWER},
        }
    },
)

INPUT_MESSAGE = FieldTable(
    "a message of Anthropic", {"Anthropic": {"role": OBEYED, "content": OBEYED}}
)
TEXT_BLOCK = FieldTable(
    "a text block",
    {
        "Anthropic": {
            "type": OBEYED,
            "text": OBEYED,
            "cache_control": CACHE,
            "citations": refused("models do not read the sources of a text", []),
        }
    },
)
THINKING_BLOCK = FieldTable(
    "a thinking block",
    {
        "Anthropic": {
            "type": OBEYED,
            "thinking": OBEYED,
            "signature": NoEffect(
                "reasoning is not signed; it is given to the chat template as it is"
            ),
        }
    },
)
TOOL_USE_BLOCK = FieldTable(
    "a tool_use block",
    {
        "Anthropic": {
            "type": OBEYED,
            "id": OBEYED,
            "name": OBEYED,
            "input": OBEYED,
            "cache_control": CACHE,
            "caller": refused("only the model calls tools", {"type": "direct"}),
            "toolset_name": refused(ON_ANTHROPICS_SERVERS),
        }
    },
)
TOOL_RESULT_BLOCK = FieldTable(
    "a tool_result block",
    {
        "Anthropic": {
            "type": OBEYED,
            "tool_use_id": OBEYED,
            "content": OBEYED,
            "is_error": NoEffect("chat templates have no mark for it; the model reads the content"),
            "cache_control": CACHE,
            "toolset_name": refused(ON_ANTHROPICS_SERVERS),
        }
    },
)
ANTHROPIC_TOOL = FieldTable(
    "a tool of Anthropic",
    {
        "Anthropic": {
            "type": OBEYED,
            "name": OBEYED,
            "description": OBEYED,
            "input_schema": OBEYED,
            "cache_control": CACHE,
            "eager_input_streaming": NoEffect("arguments are always sent as they are made"),
            "strict": OBEYED,
            "input_examples": refused("put examples into the description", []),
            "defer_loading": refused("the model sees all tools of a request", False),
            "allowed_callers": refused("only the model calls tools", ["direct"]),
        }
    },
)
ANTHROPIC_TOOL_CHOICE = FieldTable(
    "tool_choice of Anthropic",
    {"Anthropic": {"type": OBEYED, "name": OBEYED, "disable_parallel_tool_use": OBEYED}},
)
THINKING = FieldTable(
    "thinking",
    {
        "Anthropic": {
            "type": OBEYED,
            "display": OBEYED,
            "budget_tokens": refused(
                'the length of reasoning is not limited; use {"type": "adaptive"}'
            ),
            "block_binding": refused("reasoning is not signed, so it is bound to nothing"),
        }
    },
)
OUTPUT_CONFIG = FieldTable(
    "output_config",
    {
        "Anthropic": {
            "effort": OBEYED,
            "format": OBEYED,
            "task_budget": refused(ON_ANTHROPICS_SERVERS),
        }
    },
)
OUTPUT_FORMAT = FieldTable(
    "output_config.format",
    {"Anthropic": {"type": OBEYED, "schema": OBEYED, "name": NoEffect("models do not see it")}},
)

# Field -> what it may be; of the obeyed fields of all tables here.
_FLAG = "true or false"
_BLOCKS = "a string, or a list of blocks"
WORDS = {
    "messages": "a list of at least one message, each an object",
    "system": "a string, or a list of text blocks",
    "tools": "a list of objects",
    "tool_choice": 'an object whose type is "auto", "any", "tool" or "none"',
    "thinking": 'an object whose type is "adaptive" or "disabled"',
    "output_config": "an object",
    "stop_sequences": f"a list of at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters",
    "role": '"user", "assistant" or "system"',
    "content": _BLOCKS,
    "text": "a string",
    "id": "a string, not empty",
    "tool_use_id": "the id of a tool_use block of the message before it",
    "input": "an object",
    "input_schema": "a JSON schema of an object",
    "name": "1 to 128 letters, digits, '_' and '-'",
    "description": "a string",
    "strict": _FLAG,
    "disable_parallel_tool_use": _FLAG,
    "display": '"summarized", which shows all reasoning, or "omitted"',
    "effort": "a string",
    "format": 'an object with type "json_schema" and a schema',
    "schema": "a JSON schema",
}  # fmt: skip

# Tables, each with the words for fields that have another meaning in it.
ANTHROPIC_TABLES: tuple[tuple[FieldTable, dict[str, str]], ...] = (
    (MESSAGES, {}),
    (COUNT_TOKENS, {}),
    (INPUT_MESSAGE, {}),
    (TEXT_BLOCK, {"type": '"text"'}),
    (THINKING_BLOCK, {"type": '"thinking"', "thinking": "a string"}),
    (TOOL_USE_BLOCK, {"type": '"tool_use"'}),
    (TOOL_RESULT_BLOCK, {"type": '"tool_result"', "content": "a string, or a list of text blocks"}),
    (ANTHROPIC_TOOL, {"type": '"custom"'}),
    (
        ANTHROPIC_TOOL_CHOICE,
        {"type": '"auto", "any", "tool" or "none"', "name": "the name of a tool in tools"},
    ),
    (THINKING, {"type": '"adaptive" or "disabled"'}),
    (OUTPUT_CONFIG, {}),
    (OUTPUT_FORMAT, {"type": '"json_schema"'}),
)
