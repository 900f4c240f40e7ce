"""Anthropic's requests, and the generation request that they make.

The models have the fields that are obeyed; `api/fields/messages.py` has all others. Null means unset for all of them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from modelswarm_gateway.api.fields.messages import COUNT_TOKENS, MESSAGES, WORDS
from modelswarm_gateway.api.fields.request_model import RequestModel
from modelswarm_gateway.api.http.openai_requests import ListOf, StopString, parse_body
from modelswarm_gateway.api.http.validation_messages import ALLOWED
from modelswarm_gateway.api.messages.conversation import read_conversation
from modelswarm_gateway.api.messages.options import (
    check_continuation,
    read_answer,
    read_output_config,
    read_thinking,
)
from modelswarm_gateway.generation.request import MAX_STOPS, ChatPrompt, GenerationRequest
from modelswarm_gateway.generation.sampling_ranges import RANGES
from modelswarm_gateway.models.sampling_defaults import SamplingOptions

MESSAGES_ALLOWED = {**ALLOWED, **WORDS}
Object = dict[str, Any]


def _in_range(name: str, default: Any) -> Any:
    """Return a field with the limits of that sampling field. `default`: None, or ... for a field that is required."""
    return Field(default, **RANGES[name].pydantic_limits())


class CountTokensRequest(RequestModel):
    table = COUNT_TOKENS
    model: str = Field(min_length=1)
    messages: ListOf[Object] = Field(min_length=1)
    system: str | ListOf[Object] | None = None
    tools: ListOf[Object] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None

    def to_generation_request(self) -> GenerationRequest:
        """Return the request for an answer to this prompt. Raise ApiError."""
        shows_reasoning, variables = read_thinking(self.thinking)
        effort, grammar = read_output_config(self.output_config)
        if effort is not None:
            variables["reasoning_effort"] = effort
        messages = read_conversation(self.system, self.messages)
        answer = read_answer(self.tools or (), self.tool_choice, include_reasoning=shows_reasoning)
        continues = messages[-1]["role"] == "assistant"
        if continues:
            is_thinking = (self.thinking or {}).get("type", "disabled") != "disabled"
            check_continuation(answer, is_thinking=is_thinking)
            variables["add_generation_prompt"] = False
        return GenerationRequest(
            self.model,
            ChatPrompt(messages, variables, continues=continues),
            "messages",
            self.sampling_options(),
            self.stops(),
            grammar=grammar,
            answer=answer,
        )

    def sampling_options(self) -> SamplingOptions:
        return SamplingOptions()

    def stops(self) -> tuple[str, ...]:
        return ()


class MessagesRequest(CountTokensRequest):
    table = MESSAGES
    max_tokens: int = _in_range("max_tokens", ...)
    temperature: float | None = _in_range("temperature", None)
    top_p: float | None = _in_range("top_p", None)
    top_k: int | None = _in_range("top_k", None)
    seed: int | None = _in_range("seed", None)
    stop_sequences: Annotated[ListOf[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None

    def sampling_options(self) -> SamplingOptions:
        return SamplingOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
        )

    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences or ())


def parse_messages(body: object) -> MessagesRequest:
    """Validate the body of a request for a message. Raise ApiError."""
    return parse_body(MessagesRequest, body, MESSAGES_ALLOWED)


def parse_count_tokens(body: object) -> CountTokensRequest:
    """Validate the body of a request to count tokens. Raise ApiError."""
    return parse_body(CountTokensRequest, body, MESSAGES_ALLOWED)
