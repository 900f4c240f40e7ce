"""Fields of OpenAI's requests: chat completions, text completions, and the objects inside them.

Data only. To make a field work, change its state to OBEYED, and give the models of `openai_requests.py` an attribute of
its name.
"""

from __future__ import annotations

from modelswarm_gateway.api.fields.extensions import (
    HUGGING_FACE,
    LLAMA_CPP,
    MODELSWARM,
    NOT_BUILT,
    SGLANG,
    TEXT_ONLY,
    VLLM,
)
from modelswarm_gateway.api.fields.states import OBEYED, FieldTable, NoEffect, Section, refused

NOTHING_KEPT = NoEffect("answers are not stored; the log has ids and sizes only")
ONE_TIER = NoEffect("there is one tier")
CALLER = NoEffect("the end user behind a request changes nothing about the answer")
OPENAI_CACHE = NoEffect("sessions are kept by session_id, whatever OpenAI's cache is told")
ON_OPENAIS_SERVERS = "it is run by OpenAI's own servers"
OF_CHAT = "it is a field of POST /v1/chat/completions"
OF_COMPLETIONS = "it is a field of POST /v1/completions"

_SHARED: Section = {
    "model": OBEYED,
    "max_tokens": OBEYED,
    "temperature": OBEYED,
    "top_p": OBEYED,
    "seed": OBEYED,
    "stop": OBEYED,
    "stream": OBEYED,
    "stream_options": OBEYED,
    "n": OBEYED,
    "presence_penalty": OBEYED,
    "frequency_penalty": OBEYED,
    "logit_bias": OBEYED,
    "response_format": OBEYED,
    "user": CALLER,
    "safety_identifier": CALLER,
    "metadata": NOTHING_KEPT,
    "store": NOTHING_KEPT,
    "service_tier": ONE_TIER,
    "prompt_cache_key": OPENAI_CACHE,
    "prompt_cache_options": OPENAI_CACHE,
    "prompt_cache_retention": OPENAI_CACHE,
    "prediction": NoEffect("a guess of the answer only speeds OpenAI's servers up"),
}

_CHAT: Section = {
    "messages": OBEYED,
    "max_completion_tokens": OBEYED,
    "reasoning_effort": OBEYED,
    "logprobs": OBEYED,
    "top_logprobs": OBEYED,
    "tools": OBEYED,
    "tool_choice": OBEYED,
    "parallel_tool_calls": OBEYED,
    "functions": refused("use tools", []),
    "function_call": refused("use tool_choice", "none", "auto"),
    "verbosity": refused(NOT_BUILT, "medium"),
    "modalities": refused(TEXT_ONLY, ["text"]),
    "audio": refused(TEXT_ONLY, {}),
    "moderation": refused(ON_OPENAIS_SERVERS),
    "web_search_options": refused(ON_OPENAIS_SERVERS),
    "prompt": refused(OF_COMPLETIONS),
    "suffix": refused(OF_COMPLETIONS, ""),
    "best_of": refused(OF_COMPLETIONS, 1),
}

_COMPLETIONS: Section = {
    "prompt": OBEYED,
    "suffix": refused("the models that are served cannot fill a gap in a text", ""),
    "best_of": refused(
        "use n, which returns all answers, or num_beams, of which n are returned", 1
    ),
    "echo": OBEYED,
    "add_special_tokens": OBEYED,
    "logprobs": OBEYED,
    "top_logprobs": refused(f"use logprobs; {OF_CHAT}", 0),
    "messages": refused(OF_CHAT),
    "max_completion_tokens": refused(f"use max_tokens; {OF_CHAT}"),
    "reasoning_effort": refused(OF_CHAT),
    "tools": refused(OF_CHAT, []),
    "tool_choice": refused(OF_CHAT, "none", "auto"),
    "parallel_tool_calls": refused(OF_CHAT, True, False),
    "functions": refused(OF_CHAT, []),
    "function_call": refused(OF_CHAT, "none", "auto"),
    "verbosity": refused(OF_CHAT, "medium"),
    "modalities": refused(OF_CHAT, ["text"]),
    "audio": refused(OF_CHAT, {}),
    "moderation": refused(OF_CHAT),
    "web_search_options": refused(OF_CHAT),
}

# Extensions that only one of the two has.
_CHAT_TEMPLATE: Section = {
    "chat_template_kwargs": OBEYED,
    "chat_template": refused("templates of clients are not run; the model's own is used"),
    "add_generation_prompt": OBEYED,
    "continue_final_message": OBEYED,
    "documents": OBEYED,
    "add_special_tokens": refused("the chat template writes the special tokens of a chat", False),
    "echo": refused("the answer does not begin with a copy of the last message", False),
    "include_reasoning": OBEYED,
    "separate_reasoning": refused(NOT_BUILT, True),
    "stream_reasoning": refused(NOT_BUILT, True),
    "reasoning": refused("use reasoning_effort", {}),
    "thinking": refused("use chat_template_kwargs", {}),
    "enable_thinking": refused("use chat_template_kwargs"),
    "thinking_forced_open": refused("use chat_template_kwargs", False),
    "parse_tool_calls": refused(NOT_BUILT),
    "media_io_kwargs": refused(TEXT_ONLY, {}),
    "mm_processor_kwargs": refused(TEXT_ONLY, {}),
    "return_prompt_text": refused("use POST /tokenize", False),
}
_COMPLETIONS_HAVE = ("echo", "add_special_tokens")
_NO_CHAT_TEMPLATE: Section = {
    name: refused(OF_CHAT, *getattr(state, "harmless", ()))
    for name, state in _CHAT_TEMPLATE.items()
    if name not in _COMPLETIONS_HAVE
}

_EXTENSIONS = {
    "ModelSwarm": MODELSWARM,
    "vLLM": VLLM,
    "SGLang": SGLANG,
    "llama.cpp and Ollama": LLAMA_CPP,
    "Hugging Face": HUGGING_FACE,
}

CHAT = FieldTable(
    "POST /v1/chat/completions",
    {"OpenAI": {**_SHARED, **_CHAT}, "chat templates": _CHAT_TEMPLATE, **_EXTENSIONS},
)
COMPLETIONS = FieldTable(
    "POST /v1/completions",
    {"OpenAI": {**_SHARED, **_COMPLETIONS}, "chat templates": _NO_CHAT_TEMPLATE, **_EXTENSIONS},
)

MESSAGE = FieldTable(
    "a message",
    {
        "OpenAI": {
            "role": OBEYED,
            "content": OBEYED,
            "name": OBEYED,
            "refusal": OBEYED,
            "tool_calls": OBEYED,
            "tool_call_id": OBEYED,
            "function_call": refused("use tool_calls"),
            "audio": refused(TEXT_ONLY),
            "annotations": NoEffect("links of OpenAI's web search, which models do not read"),
            "parsed": NoEffect(
                "OpenAI's clients add it to what they have parsed: it is in content"
            ),
        },
        "vLLM and SGLang": {
            "reasoning": OBEYED,
            "reasoning_content": OBEYED,
            "tools": refused(NOT_BUILT, []),
            "task": refused(NOT_BUILT),
        },
    },
)

CONTENT_PART = FieldTable(
    "a content part",
    {
        "OpenAI": {
            "type": OBEYED,
            "text": OBEYED,
            "refusal": OBEYED,
            "image_url": refused(TEXT_ONLY),
            "input_audio": refused(TEXT_ONLY),
            "file": refused(TEXT_ONLY),
            "prompt_cache_breakpoint": OPENAI_CACHE,
        },
        "vLLM and SGLang": {
            "audio_url": refused(TEXT_ONLY),
            "video_url": refused(TEXT_ONLY),
            "image_embeds": refused(TEXT_ONLY),
            "uuid": refused(TEXT_ONLY),
            "thinking": refused(NOT_BUILT),
        },
        "Anthropic": {"cache_control": OPENAI_CACHE},
    },
)

STREAM_OPTIONS = FieldTable(
    "stream_options",
    {
        "OpenAI": {
            "include_usage": OBEYED,
            "include_obfuscation": refused("events are not padded with random text", False),
        },
        "vLLM": {"continuous_usage_stats": OBEYED},
    },
)

TABLES = (CHAT, COMPLETIONS, MESSAGE, CONTENT_PART, STREAM_OPTIONS)
