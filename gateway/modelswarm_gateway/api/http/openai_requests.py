"""OpenAI's requests: the fields that are obeyed, and the generation request that they make.

Used by the HTTP API. The models have the fields that are obeyed. `api/fields` has all others, which are refused or have
no effect; a field that is in no table is refused. Null means unset for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import Field, ValidationError

from modelswarm.protocol.messages import MAX_LOGPROBS
from modelswarm.protocol.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
)
from modelswarm_gateway.api.fields.beams import BEAM_FIELDS, read_beams
from modelswarm_gateway.api.fields.formats import take_formats
from modelswarm_gateway.api.fields.openai import (
    CHAT,
    COMPLETIONS,
    CONTENT_PART,
    MESSAGE,
    STREAM_OPTIONS,
)
from modelswarm_gateway.api.fields.request_model import RequestModel
from modelswarm_gateway.api.http.validation_messages import ALLOWED, first_problem, missing_field
from modelswarm_gateway.api.tools.definitions import read_answer_options
from modelswarm_gateway.api.tools.messages import check_conversation, read_tool_calls
from modelswarm_gateway.api.tools.objects import MAX_DOCUMENT_BYTES, check_size
from modelswarm_gateway.backend.beams.options import BeamOptions
from modelswarm_gateway.errors import invalid_field, invalid_request
from modelswarm_gateway.generation.grammar.request_fields import GRAMMAR_FIELDS, read_grammar
from modelswarm_gateway.generation.grammar.source import GrammarSource
from modelswarm_gateway.generation.request import (
    MAX_SESSION_ID_LENGTH,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    TextOptions,
    TextPrompt,
    TokenPrompt,
    Truncation,
    check_append,
)
from modelswarm_gateway.generation.sampling_ranges import (
    MAX_BAD_SEQUENCES,
    MAX_BAD_STRINGS,
    MAX_BAD_WORD_LENGTH,
    MAX_BIAS,
    MAX_STOP_TOKENS,
    RANGES,
)
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.models.tokenizer import SPECIAL_TOKENS

# Variables of chat templates that the request's fields and the model's files determine.
RESERVED_VARIABLES = {"messages", "add_generation_prompt", "tools", "documents", *SPECIAL_TOKENS}
MAX_LENGTH_PENALTY = 10
MAX_CHOICES = 128  # answers to one prompt, as OpenAI allows
MAX_ANSWERS = 1024  # of one request, to all its prompts
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions


class TextPart(RequestModel):
    table = CONTENT_PART
    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


Item = TypeVar("Item")
# Only the first wrong entry is reported; findings about a million of them would fill the memory.
ListOf = Annotated[list[Item], Field(fail_fast=True)]
Content: TypeAlias = str | ListOf[TextPart]


class ChatMessage(RequestModel):
    table = MESSAGE
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class StreamOptions(RequestModel):
    table = STREAM_OPTIONS
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]
BadSequence = Annotated[ListOf[TokenId], Field(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
LogitBias = Annotated[dict[TokenKey, Bias], Field(max_length=MAX_LOGIT_BIAS, fail_fast=True)]


def _in_range(name: str) -> Any:
    """Return a field that may be absent, with the limits of that sampling field."""
    return Field(None, **RANGES[name].pydantic_limits())


class _Request(RequestModel):
    model: str = Field(min_length=1)
    max_tokens: int | None = _in_range("max_tokens")
    temperature: float | None = _in_range("temperature")
    top_p: float | None = _in_range("top_p")
    top_k: int | None = _in_range("top_k")
    min_p: float | None = _in_range("min_p")
    repetition_penalty: float | None = _in_range("repetition_penalty")
    typical_p: float | None = _in_range("typical_p")
    presence_penalty: float | None = _in_range("presence_penalty")
    frequency_penalty: float | None = _in_range("frequency_penalty")
    no_repeat_ngram_size: int | None = _in_range("no_repeat_ngram_size")
    min_tokens: int | None = _in_range("min_tokens")
    logit_bias: LogitBias | None = None
    bad_words: Annotated[ListOf[BadWord], Field(max_length=MAX_BAD_STRINGS)] | None = None
    bad_words_ids: Annotated[ListOf[BadSequence], Field(max_length=MAX_BAD_SEQUENCES)] | None = None
    stop_token_ids: Annotated[ListOf[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    allowed_token_ids: (
        Annotated[ListOf[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None
    ) = None
    seed: int | None = _in_range("seed")
    stop: StopString | Annotated[ListOf[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    grammar: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    num_beams: int | None = Field(None, ge=1, le=MAX_LOGPROBS)
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    early_stopping: bool | Literal["never"] | None = None
    session_id: str | None = Field(None, min_length=1, max_length=MAX_SESSION_ID_LENGTH)
    append: bool | None = None
    session_position: int | None = Field(None, ge=0)

    default_max_tokens: ClassVar[int | None] = None

    def stream_usage(self) -> tuple[bool, bool]:
        """Return whether a stream ends with its usage, and whether its events have it so far. Raise ApiError."""
        if (options := self.stream_options) is None:
            return False, False
        if not self.stream:
            raise invalid_field("stream_options", "only a stream has options; send stream: true")
        if options.continuous_usage_stats and not options.include_usage:
            param = "stream_options.continuous_usage_stats"
            raise invalid_request(param, f"{param}: it needs include_usage: true beside it")
        return bool(options.include_usage), bool(options.continuous_usage_stats)

    def answer_count(self) -> int:
        """Return the number of answers to the prompt. Raise ApiError for several answers of a named session."""
        if (self.n or 1) > 1 and self.session_id is not None:
            detail = f"n is {self.n}; a session has one log and so one answer: leave out session_id or send n: 1"
            raise invalid_request("n", detail)
        return self.n or 1

    def token_limit(self) -> int | None:
        return self.max_tokens

    def echoes(self) -> bool:
        """Return whether the answer begins with the prompt."""
        return False

    def logprobs_count(self) -> int | None:
        """Return the top alternatives to report with each token; None: no report."""
        raise NotImplementedError

    def answer_options(self) -> AnswerOptions | None:
        """Return the options of a chat's answer; None: it is plain text."""
        return None

    def given_prompt(self) -> tuple[str, Prompt]:
        """Return the name of the field that carries the first prompt, and the prompt."""
        raise NotImplementedError

    def more_prompts(self) -> Sequence[tuple[str, Prompt]]:
        """Return the prompts behind the first one in the same way. Raise ApiError for too many."""
        return ()

    def _prompt_logprobs_count(self) -> int | None:
        """Return the top alternatives to report with each token of the prompt; None: no report."""
        if self.prompt_logprobs is not None and self.stream:
            detail = "a stream does not have them; leave stream out"
            raise invalid_field("prompt_logprobs", detail)
        counts = [self.logprobs_count() if self.echoes() else None, self.prompt_logprobs]
        return max((each for each in counts if each is not None), default=None)

    def _truncation(self) -> Truncation | None:
        size, side = self.truncate_prompt_tokens, self.truncation_side
        if size is None:
            if side is not None:
                detail = "nothing is truncated without truncate_prompt_tokens"
                raise invalid_field("truncation_side", detail)
            return None
        param = "truncate_prompt_tokens"
        if size == 0:
            raise invalid_request(param, f"{param}: 0 keeps nothing; send -1, or a number from 1")
        if self.append:
            detail = "appended input is never truncated; leave it or append out"
            raise invalid_field(param, detail)
        return Truncation(size if size > 0 else None, keeps_start=side == "right")

    def _grammar_source(self) -> GrammarSource | None:
        names = (*GRAMMAR_FIELDS, "guided_whitespace_pattern", "ignore_eos")
        return read_grammar(take_formats({name: getattr(self, name) for name in names}))

    def _beams(self) -> BeamOptions | None:
        names = (*BEAM_FIELDS, "n", "stream", "session_id", "stop", "temperature")
        fields = {name: getattr(self, name) for name in names}
        answer = self.answer_options()
        fields |= {"max_tokens": self.token_limit(), "tools": answer is not None and answer.tools}
        beams = read_beams(fields)
        if beams is not None and (grammar := self._grammar_source()) is not None:
            detail = "a beam search has no grammar; leave one of them out"
            raise invalid_field(grammar.param, detail)
        return beams

    def to_generation_request(self) -> GenerationRequest:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        field, prompt = self.given_prompt()
        check_append(self.session_id, self.append, self.session_position)
        options = SamplingOptions(
            max_tokens=self.token_limit(),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            typical_p=self.typical_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            min_tokens=self.min_tokens,
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            bad_words=tuple(self.bad_words or ()),
            bad_words_ids=tuple(map(tuple, self.bad_words_ids or ())),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            seed=self.seed,
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.logprobs_count(),
            prompt_logprobs=self._prompt_logprobs_count(),
        )
        return GenerationRequest(
            self.model,
            prompt,
            field,
            options,
            stop,
            self.session_id,
            self.default_max_tokens,
            append=bool(self.append),
            position=self.session_position,
            echo=self.echoes(),
            streams=bool(self.stream),
            grammar=self._grammar_source(),
            answer=self.answer_options(),
            text=TextOptions(
                all_special=self.skip_special_tokens is False,
                keeps_stop=bool(self.include_stop_str_in_output),
            ),
            truncation=self._truncation(),
            beams=self._beams(),
        )

    def to_generation_requests(self) -> list[GenerationRequest]:
        """Return one request for each prompt. Raise ApiError."""
        first = self.to_generation_request()
        return [first] + [
            replace(first, prompt_field=field, prompt=prompt)
            for field, prompt in self.more_prompts()
        ]


class ChatRequest(_Request):
    table = CHAT
    messages: ListOf[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = _in_range("max_tokens")
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: ListOf[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    def answer_options(self) -> AnswerOptions:
        return read_answer_options(
            self.tools,
            self.tool_choice,
            self.parallel_tool_calls,
            include_reasoning=self.include_reasoning is not False,
        )

    def logprobs_count(self) -> int | None:
        if not self.logprobs and self.top_logprobs:
            raise invalid_request(
                "top_logprobs",
                f"top_logprobs is {self.top_logprobs}; it needs logprobs: true beside it",
            )
        return (self.top_logprobs or 0) if self.logprobs else None

    def token_limit(self) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise invalid_request(
                "max_completion_tokens",
                f"max_completion_tokens is {new} and max_tokens is {old}: give one, or the same",
            )
        return old if new is None else new

    def given_prompt(self) -> tuple[str, Prompt]:
        variables = dict(self.chat_template_kwargs or {})
        check_size("chat_template_kwargs", variables)
        if taken := sorted(RESERVED_VARIABLES & variables.keys()):
            field = f"chat_template_kwargs.{taken[0]}"
            raise invalid_request(field, f"{field}: the gateway sets this variable; leave it out")
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.add_generation_prompt is False or self.continue_final_message:
            variables["add_generation_prompt"] = False
        if self.documents:
            check_size("documents", self.documents, MAX_DOCUMENT_BYTES)
            variables["documents"] = self.documents
        messages = [_template_message(f"messages[{n}]", m) for n, m in enumerate(self.messages)]
        check_conversation(messages, is_appended=bool(self.append))
        if continues := bool(self.continue_final_message):
            self._check_continuation()
        return "messages", ChatPrompt(messages, variables, continues=continues)

    def _check_continuation(self) -> None:
        param = "continue_final_message"
        if self.add_generation_prompt:
            detail = "with add_generation_prompt: true a new message is begun; send one of the two"
            raise invalid_field(param, detail)
        if self.messages[-1].tool_calls:
            detail = "the last message has tool_calls; only one of text can be continued"
            raise invalid_field(param, detail)


class CompletionRequest(_Request):
    table = COMPLETIONS
    prompt: str | ListOf[TokenId] | ListOf[str] | ListOf[ListOf[TokenId]]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    default_max_tokens = COMPLETION_MAX_TOKENS

    def logprobs_count(self) -> int | None:
        return self.logprobs

    def echoes(self) -> bool:
        return bool(self.echo)

    def given_prompt(self) -> tuple[str, Prompt]:
        given = self.prompt
        if isinstance(given, str):
            return "prompt", self._read_prompt(given)
        if not given:
            raise invalid_field("prompt", "the list is empty")
        if isinstance(given[0], int):
            return "prompt", self._read_prompt([t for t in given if isinstance(t, int)])
        return "prompt[0]", self._read_prompt(given[0])

    def more_prompts(self) -> list[tuple[str, Prompt]]:
        given = () if isinstance(self.prompt, str) else self.prompt[1:]
        others = [each for each in given if not isinstance(each, int)]
        if others:
            self._check_prompts(len(others) + 1)
        return [(f"prompt[{n}]", self._read_prompt(each)) for n, each in enumerate(others, 1)]

    def _check_prompts(self, count: int) -> None:
        if self.session_id is not None:
            detail = f"{count} prompts and one session_id; leave session_id out, or send one prompt"
            raise invalid_field("prompt", detail)
        answers = count * self.answer_count()
        if answers > MAX_ANSWERS:
            detail = f"{count} prompts with n: {self.answer_count()} want {answers} answers"
            raise invalid_field("prompt", f"{detail}; at most {MAX_ANSWERS} are allowed")

    def _read_prompt(self, given: str | Sequence[int]) -> Prompt:
        if isinstance(given, str):
            return TextPrompt(given, self.add_special_tokens is not False)
        if self.add_special_tokens:
            raise invalid_field("add_special_tokens", "only a text gets them; leave it out")
        return TokenPrompt(tuple(given))


def _template_message(path: str, message: ChatMessage) -> dict[str, Any]:
    """Return the message as templates expect it: one text, and the role `system` for OpenAI's `developer`."""
    made: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content_text(f"{path}.content", message),
    }
    if message.refusal and (message.role != "assistant" or message.content is not None):
        detail = "only an assistant's message without content has it; leave one of them out"
        raise invalid_field(f"{path}.refusal", detail)
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            made[name] = value
    if (reasoning := _reasoning(path, message)) is not None:
        made |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        made["tool_calls"] = read_tool_calls(f"{path}.tool_calls", message.tool_calls)
    return made


def _reasoning(path: str, message: ChatMessage) -> str | None:
    """Return the reasoning of a message under either of its names. Raise ApiError for two different ones."""
    names = ("reasoning", "reasoning_content")
    given = {text for name in names if (text := getattr(message, name)) is not None}
    if len(given) > 1:
        param = f"{path}.reasoning_content"
        raise invalid_request(param, f"{param}: it differs from reasoning; send one of the two")
    return next(iter(given), None)


def _content_text(path: str, message: ChatMessage) -> str:
    """Return the text of a message. Raise ApiError without one; an assistant that calls tools needs none."""
    content = message.content
    if content is None and message.role == "assistant":
        content = message.refusal if message.refusal or not message.tool_calls else ""
    if content is None:
        raise missing_field(path)
    if isinstance(content, str):
        return content
    if not content:
        raise invalid_request(path, f"{path}: the list is empty; at least one text part is needed")
    return "\n".join(_part_text(f"{path}[{n}]", part) for n, part in enumerate(content))


def _part_text(path: str, part: TextPart) -> str:
    text, other = part.text, part.refusal
    if part.type == "refusal":
        text, other = other, text
    if text is None:
        raise missing_field(f"{path}.{part.type}")
    if other is not None:
        name = "text" if part.type == "refusal" else "refusal"
        raise invalid_field(f"{path}.{name}", f"a part with the type {part.type} does not have it")
    return text


Parsed = TypeVar("Parsed", bound=RequestModel)


def parse_body(model: type[Parsed], body: object, allowed: Mapping[str, str] = ALLOWED) -> Parsed:
    """Validate the body of a request. Raise ApiError. `allowed`: what each field may be."""
    if not isinstance(body, dict):
        raise invalid_request(None, "the body must be a JSON object")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise first_problem(error, allowed) from error


def parse_chat(body: object) -> ChatRequest:
    """Validate the body of a chat completion. Raise ApiError."""
    return parse_body(ChatRequest, body)


def parse_completion(body: object) -> CompletionRequest:
    """Validate the body of a text completion. Raise ApiError."""
    return parse_body(CompletionRequest, body)
