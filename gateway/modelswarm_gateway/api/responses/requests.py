"""The body of `POST /v1/responses`: its checks, and the generation request that it makes of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from modelswarm.protocol.messages import MAX_LOGPROBS
from modelswarm_gateway.api.fields.request_model import RequestModel
from modelswarm_gateway.api.fields.responses import (
    OWN_WORDS,
    REASONING,
    RESPONSES,
    STREAM_OPTIONS,
)
from modelswarm_gateway.api.http.openai_requests import ListOf, parse_body
from modelswarm_gateway.api.http.validation_messages import ALLOWED
from modelswarm_gateway.api.responses.chat_names import (
    nested_choice,
    nested_format,
    nested_tools,
    turn_back,
)
from modelswarm_gateway.api.responses.input_items import as_items, read_messages
from modelswarm_gateway.api.responses.response_ids import context_mark
from modelswarm_gateway.api.tools.definitions import read_answer_options
from modelswarm_gateway.api.tools.objects import read_object
from modelswarm_gateway.errors import ApiError, Code, invalid_field, invalid_request
from modelswarm_gateway.generation.grammar.request_fields import read_grammar
from modelswarm_gateway.generation.grammar.source import GrammarSource
from modelswarm_gateway.generation.request import ChatPrompt, GenerationRequest
from modelswarm_gateway.generation.sampling_ranges import RANGES
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions
from modelswarm_gateway.models.sampling_defaults import SamplingOptions

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's limits
RESPONSES_ALLOWED = ALLOWED | OWN_WORDS  # field -> what it may be
Item = Mapping[str, Any]


def _in_range(name: str) -> Any:
    return Field(None, **RANGES[name].pydantic_limits())


class ResponsesBody(RequestModel):
    table = RESPONSES

    model: str = Field(min_length=1)
    input: str | ListOf[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = _in_range("temperature")
    top_p: float | None = _in_range("top_p")
    top_k: int | None = _in_range("top_k")
    seed: int | None = _in_range("seed")
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: ListOf[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    metadata: Annotated[dict[str, str], Field(fail_fast=True)] | None = None
    store: bool | None = None
    previous_response_id: str | None = Field(None, min_length=1)


@dataclass(frozen=True)
class ResponsesRequest:
    """A checked body, with what its nested fields mean."""

    body: ResponsesBody
    items: Sequence[Item]
    answer: AnswerOptions
    grammar: GrammarSource | None
    effort: str | None

    @property
    def is_stored(self) -> bool:
        return self.body.store is not False

    @property
    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        return {} if self.effort is None else {"reasoning_effort": self.effort}

    @cached_property
    def context(self) -> str:
        """Return the mark of what the template writes before the conversation."""
        tools = [tool.template_value() for tool in self.answer.tools]
        return context_mark(self.body.instructions, tools, self.variables)

    def whole(self, before: Sequence[Item] = ()) -> GenerationRequest:
        """Return the request whose prompt is the whole conversation. `before`: items of earlier responses."""
        messages = read_messages([*before, *self.items], known=len(before))
        if self.body.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.body.instructions})
        return self._generation_request(messages)

    def appended(self) -> GenerationRequest:
        """Return the request whose prompt is only what is new behind the log of a session."""
        messages = read_messages(self.items, is_appended=True)
        return replace(self._generation_request(messages), append=True)

    def _generation_request(self, messages: Sequence[Mapping[str, Any]]) -> GenerationRequest:
        body = self.body
        options = SamplingOptions(
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            ignore_eos=bool(body.ignore_eos),
            logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
        )
        return GenerationRequest(
            body.model,
            ChatPrompt(messages, self.variables),
            "input",
            options,
            grammar=self.grammar,
            answer=self.answer,
        )


def parse_responses(body: object) -> ResponsesRequest:
    """Validate the body. Raise ApiError with the names of this API."""
    parsed = parse_body(ResponsesBody, body, RESPONSES_ALLOWED)
    try:
        return _read(parsed)
    except ApiError as error:
        raise turn_back(error) from error


def _read(body: ResponsesBody) -> ResponsesRequest:
    items = as_items(body.input)
    if not items:
        raise invalid_field("input", "the list is empty; at least one item is needed")
    read_object("stream_options", body.stream_options or {}, STREAM_OPTIONS)
    _check_include(body)
    _check_metadata(body.metadata or {})
    reasoning = read_object("reasoning", body.reasoning or {}, REASONING)
    effort = reasoning.get("effort")
    if not isinstance(effort, str | None):
        raise invalid_field("reasoning.effort", "must be a string")
    answer = read_answer_options(
        nested_tools(body.tools or ()),
        nested_choice(body.tool_choice),
        # Without tools the field changes nothing, and some clients send it with every request.
        None if body.parallel_tool_calls is False and not body.tools else body.parallel_tool_calls,
        include_reasoning=True,
    )
    form = nested_format(body.text)
    grammar = read_grammar({"response_format": form, "ignore_eos": body.ignore_eos})
    body = body.model_copy(update={"input": ""})  # the items have all of it that has an effect
    return ResponsesRequest(body, items, answer, grammar, effort)


def _check_include(body: ResponsesBody) -> None:
    for place, name in enumerate(body.include or ()):
        if name != LOGPROBS:
            path = f"include[{place}]"
            detail = f"{name[:64]!r} is not supported; allowed: {LOGPROBS}"
            raise ApiError(Code.UNSUPPORTED, f"{path}: {detail}", param=path)
    if body.top_logprobs and not body.include:
        detail = f"top_logprobs is {body.top_logprobs}; it needs include: [{LOGPROBS!r}] beside it"
        raise invalid_request("top_logprobs", detail)
    if body.include and body.tools:
        detail = "log probabilities are of text only, so they cannot be asked for beside tools"
        raise ApiError(Code.UNSUPPORTED, f"include: {detail}", param="include")


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        detail = f"at most {MAX_METADATA} entries, not {len(metadata)}"
        raise invalid_field("metadata", detail)
    for name, value in metadata.items():
        if len(name) > MAX_METADATA_NAME or len(value) > MAX_METADATA_VALUE:
            detail = (
                f"names have at most {MAX_METADATA_NAME} characters, values {MAX_METADATA_VALUE}"
            )
            raise invalid_field("metadata", detail)
