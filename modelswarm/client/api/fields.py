"""Fields of requests, as the gateway obeys them: docs/reference/fields.md explains each.

`FIELDS` are those that both text completions and chats have. A test compares them with the gateway's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class _SharedFields(TypedDict, total=False):
    # The end of the answer.
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    # Sampling.
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    logit_bias: Mapping[str, float] | None
    bad_words: Sequence[str] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    allowed_token_ids: Sequence[int] | None
    # The form of the answer.
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    guided_json: Mapping[str, Any] | str | None
    guided_regex: str | None
    guided_choice: Sequence[str] | None
    guided_grammar: str | None
    guided_whitespace_pattern: str | None
    grammar: str | None
    # More about the answer.
    n: int | None
    num_beams: int | None
    use_beam_search: bool | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    return_token_ids: bool | None
    return_tokens_as_token_ids: bool | None
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    # The prompt and the session.
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None
    session_id: str | None
    append: bool | None
    session_position: int | None


class CompletionFields(_SharedFields, total=False):
    """Fields of a text completion."""

    echo: bool | None
    add_special_tokens: bool | None
    logprobs: int | None


class ChatFields(_SharedFields, total=False):
    """Fields of a chat."""

    max_completion_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None
    include_reasoning: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    documents: Sequence[Mapping[str, Any]] | None


class TokenizeFields(TypedDict, total=False):
    """Fields of a prompt, or of messages, that are tokenized."""

    add_special_tokens: bool | None
    return_token_strs: bool | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    documents: Sequence[Mapping[str, Any]] | None


COMPLETION_FIELDS = frozenset(CompletionFields.__annotations__)
CHAT_FIELDS = frozenset(ChatFields.__annotations__)
TOKENIZE_FIELDS = frozenset(TokenizeFields.__annotations__)
