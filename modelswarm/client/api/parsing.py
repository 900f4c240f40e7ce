"""Bodies and events of the gateway, parsed. ValueError if something else than a gateway made them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from modelswarm.client.api.answers import (
    Choice,
    Chunk,
    Hop,
    ServedModel,
    SessionState,
    TokenizedPrompt,
    TokenLogprob,
    ToolCall,
    ToolCallPart,
    Usage,
)

Parsed = TypeVar("Parsed")


def parse_with(parse: Callable[[Any], Parsed], body: str | bytes) -> Parsed:
    """Parse JSON by a function of this module. ValueError for any other content."""
    try:
        return parse(json.loads(body))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"not an answer of a gateway: {error!r}") from error


def parse_models(body: Mapping[str, Any]) -> list[ServedModel]:
    return [
        ServedModel(
            str(each["id"]),
            each.get("max_model_len"),
            each.get("ready"),
            each.get("chat_problem"),
            each.get("vocab_size"),
            each.get("parent"),
        )
        for each in body["data"]
    ]


def parse_usage(usage: Mapping[str, Any] | None) -> Usage | None:
    if not usage:
        return None
    details = usage.get("completion_tokens_details") or {}
    of_prompt = usage.get("prompt_tokens_details") or {}
    return Usage(
        int(usage["prompt_tokens"]),
        int(usage["completion_tokens"]),
        int(usage["total_tokens"]),
        details.get("reasoning_tokens"),
        of_prompt.get("cached_tokens"),
    )


def parse_chunks(event: Mapping[str, Any]) -> list[Chunk]:
    """Parse an event of a stream: one chunk for each choice, or one with the usage only."""
    prompt, usage = event.get("prompt_token_ids"), parse_usage(event.get("usage"))
    choices: Sequence[Mapping[str, Any]] = event["choices"]
    if not choices:
        return [Chunk(usage=usage)]
    return [_parse_chunk(choice, prompt) for choice in choices]


def _parse_chunk(choice: Mapping[str, Any], prompt: Sequence[int] | None) -> Chunk:
    delta = choice.get("delta") or {}
    prompt = choice.get("prompt_token_ids", prompt)
    return Chunk(
        text=choice.get("text") or delta.get("content") or "",
        index=int(choice["index"]),
        token_ids=tuple(choice.get("token_ids") or ()),
        finish_reason=choice.get("finish_reason"),
        logprobs=parse_logprobs(choice.get("logprobs")) or (),
        reasoning_content=delta.get("reasoning_content") or "",
        tool_calls=tuple(_parse_tool_part(each) for each in delta.get("tool_calls") or ()),
        prompt_token_ids=None if prompt is None else tuple(prompt),
    )


def _parse_tool_part(call: Mapping[str, Any]) -> ToolCallPart:
    function = call.get("function") or {}
    return ToolCallPart(
        int(call["index"]), call.get("id"), function.get("name"), function.get("arguments") or ""
    )


def parse_logprobs(logprobs: Mapping[str, Any] | None) -> tuple[TokenLogprob, ...] | None:
    """Parse those of a chat (a list of `content`) or of a text completion (parallel lists)."""
    if logprobs is None:
        return None
    if "content" in logprobs:
        return tuple(
            TokenLogprob(
                each["token"],
                each["logprob"],
                {top["token"]: top["logprob"] for top in each.get("top_logprobs") or ()},
            )
            for each in logprobs["content"] or ()
        )
    tokens = logprobs["tokens"]
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenLogprob(token, logprob, top or {})
        for token, logprob, top in zip(tokens, logprobs["token_logprobs"], tops, strict=True)
    )


def parse_body(body: Mapping[str, Any]) -> tuple[str, tuple[Choice, ...], Usage]:
    """Parse a whole answer that was not streamed: its model, choices and usage."""
    usage = parse_usage(body["usage"])
    if usage is None:
        raise ValueError("a whole answer has a usage")
    return str(body["model"]), tuple(_parse_choice(body, each) for each in body["choices"]), usage


def _parse_choice(body: Mapping[str, Any], choice: Mapping[str, Any]) -> Choice:
    message = choice.get("message") or {}
    calls = message.get("tool_calls") or ()
    prompt = choice.get("prompt_token_ids", body.get("prompt_token_ids"))
    of_prompt = choice.get("prompt_logprobs", body.get("prompt_logprobs"))
    tokens = choice.get("token_ids")
    return Choice(
        int(choice["index"]),
        choice.get("text") or message.get("content") or "",
        str(choice["finish_reason"]),
        None if tokens is None else tuple(tokens),
        parse_logprobs(choice.get("logprobs")),
        message.get("reasoning_content"),
        tuple(
            ToolCall(each["id"], each["function"]["name"], each["function"]["arguments"])
            for each in calls
        ),
        None if prompt is None else tuple(prompt),
        None if of_prompt is None else tuple(of_prompt),
    )


def parse_tokens(body: Mapping[str, Any]) -> TokenizedPrompt:
    names = body.get("token_strs")
    return TokenizedPrompt(
        tuple(body["tokens"]), body.get("max_model_len"), None if names is None else tuple(names)
    )


def parse_session(body: Mapping[str, Any]) -> SessionState:
    return SessionState(
        str(body["id"]),
        str(body["model"]),
        str(body["state"]),
        int(body["position"]),
        body["max_length"],
        body["ttl"],
        body["expires_at"],
        int(body["reroutes"]),
        tuple(Hop(hop["server"], hop["first"], hop["last"]) for hop in body["route"]),
    )
