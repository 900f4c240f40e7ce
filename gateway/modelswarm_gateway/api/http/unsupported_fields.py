"""Fields of requests that would change the answer and are not built: they are refused by name.

Used by `openai_requests.py`. The names are those of OpenAI, vLLM, SGLang, llama.cpp and transformers. A field that
changes nothing about the answer (`user`, `metadata`, `priority` ...) is not listed, and is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from modelswarm_gateway.errors import ApiError, Code

IsNoOp: TypeAlias = Callable[[Any], bool]


def _only(*values: object) -> IsNoOp:
    return lambda value: any(value == v and type(value) is type(v) for v in values)


def _zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _empty(value: Any) -> bool:
    return isinstance(value, list | dict | str) and not value


def _plain_text(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "text"


# Field -> (test for values that have no effect, such a value for the error message).
UNSUPPORTED_FIELDS: dict[str, tuple[IsNoOp, str]] = {
    "n": (_only(1), "1"),
    "best_of": (_only(1), "1"),
    "presence_penalty": (_zero, "0"),
    "frequency_penalty": (_zero, "0"),
    "logprobs": (_only(False), "false"),
    "top_logprobs": (_zero, "0"),
    "prompt_logprobs": (_zero, "0"),
    "logit_bias": (_empty, "{}"),
    "tools": (_empty, "[]"),
    "tool_choice": (_only("none", "auto"), "none"),
    "functions": (_empty, "[]"),
    "function_call": (_only("none", "auto"), "none"),
    "response_format": (_plain_text, '{"type": "text"}'),
    "structured_outputs": (_empty, "{}"),
    "guided_json": (_only(), "null"),
    "guided_regex": (_empty, '""'),
    "guided_choice": (_empty, "[]"),
    "guided_grammar": (_empty, '""'),
    "guided_whitespace_pattern": (_empty, '""'),
    "structural_tag": (_empty, "{}"),
    "json_schema": (_only(), "null"),
    "grammar": (_empty, '""'),
    "regex": (_empty, '""'),
    "ebnf": (_empty, '""'),
    "verbosity": (_only("medium"), "medium"),
    "thinking": (_empty, "{}"),
    "thinking_token_budget": (_only(), "null"),
    "modalities": (_only(["text"]), '["text"]'),
    "audio": (_empty, "{}"),
    "web_search_options": (_only(), "null"),
    "suffix": (_empty, '""'),
    "echo": (_only(False), "false"),
    "stop_token_ids": (_empty, "[]"),
    "bad_words": (_empty, "[]"),
    "allowed_token_ids": (_empty, "[]"),
    "min_tokens": (_zero, "0"),
    "use_beam_search": (_only(False), "false"),
    "include_stop_str_in_output": (_only(False), "false"),
    "skip_special_tokens": (_only(True), "true"),
    "add_generation_prompt": (_only(True), "true"),
    "continue_final_message": (_only(False), "false"),
    "truncate_prompt_tokens": (_only(), "null"),
    "prompt_embeds": (_only(), "null"),
    "documents": (_empty, "[]"),
    "chat_template": (_only(), "null"),
    "add_special_tokens": (_only(), "null"),
    "spaces_between_special_tokens": (_only(True), "true"),
    "logits_processors": (_empty, "[]"),
    "repetition_detection": (_empty, "{}"),
    "vllm_xargs": (_empty, "{}"),
    "typical_p": (_only(1, 1.0), "1"),
    "no_repeat_ngram_size": (_zero, "0"),
    "mirostat": (_zero, "0"),
    "xtc_probability": (_zero, "0"),
    "dry_multiplier": (_zero, "0"),
    "min_length": (_zero, "0"),
    "min_new_tokens": (_zero, "0"),
    "num_beams": (_only(1), "1"),
}

# Other servers' names of fields -> the field to use here.
OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "enable_thinking": "chat_template_kwargs",
}


def reject_unsupported_fields(fields: Mapping[str, Any]) -> None:
    """Raise ApiError for a field that is set and not supported. `fields`: those that are not null."""
    for name in UNSUPPORTED_FIELDS.keys() & fields.keys():
        is_harmless, allowed = UNSUPPORTED_FIELDS[name]
        if not is_harmless(fields[name]):
            detail = f"{name}: not supported by this server yet; leave it out or send {allowed}"
            raise ApiError(Code.UNSUPPORTED, detail, param=name)
    for name in OTHER_NAMES.keys() & fields.keys():
        if fields.get(OTHER_NAMES[name]) == fields[name]:
            continue  # clients of several servers send the value under all names
        detail = f"{name}: not a field of this API; use {OTHER_NAMES[name]}"
        raise ApiError(Code.UNSUPPORTED, detail, param=name)
