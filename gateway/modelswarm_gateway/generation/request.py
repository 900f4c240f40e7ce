"""The generation request, independent of the API it came from, and the encoding of its prompt.

Built by the APIs, read by the service. Knows a model only as its tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from modelswarm.protocol.messages import BlockRange, Sampling
from modelswarm.protocol.opaque import is_opaque, opaque_entries
from modelswarm_gateway.backend.beams.options import BeamOptions
from modelswarm_gateway.core.interface.errors import PromptTooLong
from modelswarm_gateway.core.interface.turn import ParkedTurn, Reservation
from modelswarm_gateway.errors import ApiError, Code, from_core, invalid_field, invalid_request
from modelswarm_gateway.generation.grammar.source import CONTENT_KINDS, GrammarSource
from modelswarm_gateway.generation.rows.returned_rows import RowOptions
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions, check_answer
from modelswarm_gateway.generation.tool_calls.families import ChatFormat, find_format
from modelswarm_gateway.generation.tool_calls.template_input import template_messages
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.models.tokenizer import (
    UNKNOWN_LIMIT,
    ModelTokenizer,
    TextTooLong,
    as_api_errors,
)

MAX_STOPS, MAX_STOP_LENGTH = 16, 1000  # stop strings of a request, characters of one
MAX_SESSION_ID_LENGTH = 256  # characters; the gateway keeps them
# Token ids in the sampling fields of all answers of a request: a server reads 4 million of them in a second.
MAX_TOKEN_IDS = 1 << 20
# Log probabilities of the prompts of all answers that run, with their alternatives; each takes some 110 bytes.
MAX_PROMPT_SCORES = 4 << 20
# Log probabilities of a prompt in one event of a stream, which takes the event loop some 5 us with each.
MAX_EVENT_SCORES = 1 << 14


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    special: bool = True  # add the tokenizer's special tokens (its bos, usually)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the template
    tools: Sequence[Mapping[str, Any]] = ()  # for the template
    continues: bool = False  # the answer goes on with the last message's text


@dataclass(frozen=True, slots=True)
class RowsPrompt:
    """Rows that stand in place of tokens' embeddings."""

    dtype: str
    shape: tuple[int, ...]  # as the client gave it
    data: bytes

    @property
    def has_block_rows(self) -> bool:
        """True if each row comes with one for each block (R14, opaque rows)."""
        return len(self.shape) == 3

    def entry_rows(self) -> list[bytes]:
        """Return the row of each entry, or its chain. The data must fit the shape."""
        size = len(self.data) // self.shape[0]
        return [self.data[at : at + size] for at in range(0, len(self.data), size)]


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt | RowsPrompt


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for the text of an answer."""

    all_special: bool = False  # special tokens are shown
    keeps_stop: bool = False  # the text ends with the stop string or stop token


@dataclass(frozen=True, slots=True)
class Truncation:
    """Tokens of a prompt that are kept if it is longer."""

    size: int | None = None  # None: as many as leave room for the answer
    keeps_start: bool = False  # not the prompt's end

    def apply(self, tokens: tuple[int, ...], room: int) -> tuple[int, ...]:
        """Return the tokens that are kept. `room`: for a prompt; 0 if unknown."""
        size = self.size or room or len(tokens)
        return tokens[:size] if self.keeps_start else tokens[-size:]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request to generate text."""

    model: str
    prompt: Prompt
    prompt_field: str  # that carried the prompt, for errors
    options: SamplingOptions
    stop: tuple[str, ...] = ()
    session_id: str | None = None
    default_max_tokens: int | None = None  # if neither the request nor the model limits the answer
    append: bool = False  # the prompt is only what is new in the session
    position: int | None = None  # of the log, behind which it is appended; None: the log's end
    check_last_turn: Callable[[ParkedTurn | None], None] = lambda kept: None
    """Raises ApiError unless the session's last turn is the one that a new turn may follow."""
    reservation: Reservation | None = None  # of a session that is opened; the prompt is not of it
    parent_id: str | None = None  # session that a new one is forked from; the prompt is of its log
    resume_after: int | None = None  # last log position that the client has
    resume_mark: str = ""  # short hash of the log up to there
    echo: bool = False  # the answer begins with the prompt
    streams: bool = False  # the answer is sent in events
    grammar: GrammarSource | None = None  # that the answer must follow
    forwarded: bool = False  # by another gateway, which takes this one for the session's owner
    answer: AnswerOptions | None = None  # None: plain text
    text: TextOptions = TextOptions()
    truncation: Truncation | None = None
    rows: RowOptions | None = None  # logits and hidden states to return
    beams: BeamOptions | None = None  # of a beam search, whose best answers are returned
    blocks: BlockRange | None = None  # of the session; None: all, on tokens


def fit_to_model(
    request: GenerationRequest, tokenizer: ModelTokenizer, parser: str
) -> tuple[GenerationRequest, ChatFormat]:
    """Return the request as the model's chat template takes it, and the template's format.

    `parser`: of tool calls, as in `find_format`. Raise ApiError if the request needs a parser that there is not.
    """
    has_tools = request.answer is not None and bool(request.answer.tools)
    form = find_format(tokenizer.chat_template(has_tools=has_tools), parser)
    return fit_to_format(request, form), form


def fit_to_format(request: GenerationRequest, form: ChatFormat) -> GenerationRequest:
    """Return the request with its prompt as the model's chat template takes it. Raise ApiError if it has no parser."""
    if not isinstance(request.prompt, ChatPrompt):
        return request
    messages = template_messages(request.prompt.messages, form)
    if request.answer is None:
        return replace(request, prompt=replace(request.prompt, messages=messages))
    check_answer(request.answer, form)
    answer = _with_format(request.answer, request.grammar, form, request.prompt)
    tools = [tool.template_value() for tool in answer.tools]
    prompt = replace(request.prompt, messages=messages, tools=tools)
    return replace(request, prompt=prompt, answer=answer)


def _with_format(
    answer: AnswerOptions, grammar: GrammarSource | None, form: ChatFormat, prompt: ChatPrompt
) -> AnswerOptions:
    """Return the options with the grammar as format of the content, if there may be more than content.

    Raise ApiError for a grammar that describes the whole answer beside tools.
    """
    if grammar is None:
        return answer
    if grammar.kind in CONTENT_KINDS:
        may_reason = (form.has_reasoning or form.is_harmony) and not prompt.continues
        return replace(answer, has_format=bool(answer.tools) or may_reason)
    if answer.tools:
        detail = (
            "it describes the whole answer and leaves no room for calls; "
            "give a JSON schema, a regex or a choice, or leave tools out"
        )
        raise ApiError(Code.UNSUPPORTED, f"{grammar.param}: {detail}", param=grammar.param)
    return answer


def check_append(session_id: str | None, append: bool | None, position: int | None) -> None:
    """Raise ApiError for a request that has only a part of these fields."""
    if append and not session_id:
        raise invalid_field("append", "only a session can be continued; send a session_id")
    if position is not None and not append:
        detail = "only appended input has a position; send append: true"
        raise invalid_field("session_position", detail)


def check_answers(options: SamplingOptions, answers: int) -> None:
    """Raise ApiError if the ids of tokens are too many for so many answers, each of which sends its own to servers."""
    ids = len(options.allowed_token_ids) + len(options.stop_token_ids) + len(options.logit_bias)
    ids += sum(map(len, options.bad_words_ids))
    if answers > 1 and answers * ids > MAX_TOKEN_IDS:
        detail = f"{answers} answers with {ids} token ids each; at most {MAX_TOKEN_IDS} in all"
        raise invalid_field("allowed_token_ids", detail)


async def encode_prompt(
    request: GenerationRequest, text: ModelTokenizer, limit: int, *, can_be_empty: bool = False
) -> tuple[int, ...]:
    """Return the prompt's tokens, by default at least one. Raise ApiError.

    `limit`: positions of the context, 0 if unknown.
    """
    longest = limit if request.truncation is None else max(limit, UNKNOWN_LIMIT)
    try:
        with as_api_errors(request.prompt_field):
            tokens = await _encode(request, text, longest)
    except TextTooLong as error:
        raise ApiError(Code.CONTEXT_LENGTH, str(error), param=request.prompt_field) from error
    if request.truncation is not None:
        room = max(1, limit - max(1, token_limit(request, text) or 1)) if limit else 0
        tokens = request.truncation.apply(tokens, room)
    if not tokens and not can_be_empty:
        raise invalid_request(
            request.prompt_field,
            f"{request.prompt_field}: the prompt is empty; at least one token is needed",
        )
    return tokens


async def _encode(request: GenerationRequest, text: ModelTokenizer, limit: int) -> tuple[int, ...]:
    match request.prompt:
        case TokenPrompt(ids):
            if 0 < limit < len(ids):  # before each token is checked
                raise from_core(PromptTooLong(len(ids), limit), request.prompt_field)
            is_log = (
                request.parent_id is not None
            )  # which may have entries that are no tokens (R14, opaque rows)
            for place, token in enumerate(ids):
                if not (0 <= token < text.vocabulary or (is_log and is_opaque(token))):
                    detail = f"{token} is not a token id; allowed: 0 to {text.vocabulary - 1}"
                    raise invalid_request(
                        request.prompt_field, f"{request.prompt_field}[{place}]: {detail}"
                    )
            return ids
        case RowsPrompt():
            return opaque_entries(request.prompt.entry_rows())
        case TextPrompt(words, special):
            special = special and not request.append
            return tuple(await text.encode(words, special=special, limit=limit))
        case ChatPrompt(messages, variables, tools, continues):
            chat = await text.encode_chat(
                messages, variables, limit, tools, continues, appends=request.append
            )
            return tuple(chat)


def token_limit(request: GenerationRequest, text: ModelTokenizer) -> int | None:
    """Return the largest number of tokens to generate; None: up to the context's end."""
    for limit in (request.options.max_tokens, text.defaults.max_tokens):
        if limit is not None:
            return limit
    return request.default_max_tokens


def prompt_scores(prompt: Sequence[int], sampling: Sampling) -> int:
    """Return the number of log probabilities that an answer has of its prompt, with the alternatives."""
    return len(prompt) * (1 + sampling.prompt_logprobs)


def check_prompt_scores(wanted: int, kept: int, *, in_event: bool) -> None:
    """Raise ApiError for more log probabilities of prompts than one event, one request or all requests may have.

    `kept`: those of other answers that run. `in_event`: they begin a stream.
    """
    if in_event and wanted > MAX_EVENT_SCORES:
        detail = f"{wanted} log probabilities of the prompt in one event; at most {MAX_EVENT_SCORES}; leave stream out"
        raise invalid_field("stream", detail)
    if wanted > MAX_PROMPT_SCORES:
        detail = f"{wanted} log probabilities of prompts; at most {MAX_PROMPT_SCORES}"
        raise invalid_field("prompt_logprobs", detail)
    if wanted and kept + wanted > MAX_PROMPT_SCORES:
        detail = f"{kept} log probabilities of prompts are kept, of at most {MAX_PROMPT_SCORES}; retry in 1 s"
        raise ApiError(Code.NO_CAPACITY, detail, param="prompt_logprobs", retry_after=1.0)
