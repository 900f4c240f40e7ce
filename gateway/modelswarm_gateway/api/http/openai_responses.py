"""OpenAI's responses: the bodies and the stream events of chat and text completions.

Used by the HTTP API. Events are built from strings prepared once per request, because one is written for every token.
Knows neither HTTP nor sessions.
"""

from __future__ import annotations

import abc
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from modelswarm.protocol.messages import PromptLogprob
from modelswarm_gateway.api.http.logprobs_json import (
    LazyList,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
)
from modelswarm_gateway.api.tools.deltas import chat_delta, chat_message
from modelswarm_gateway.generation.output.logprobs import TokenLogprob
from modelswarm_gateway.generation.tool_calls.events import OutputEvent, TextDelta

DONE = b"data: [DONE]\n\n"
Tokens = Sequence[int]
Logprobs = Sequence[TokenLogprob]
Events = Sequence[OutputEvent]
PromptEntries = LazyList[PromptLogprob | None]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Fields that all events and the body of one response share."""

    model: str
    created: int  # unix seconds
    prompts: Sequence[Tokens]  # of each answer, in the order of their indexes
    answers_per_prompt: int = 1  # these share a prompt, which counts once
    usage_in_stream: bool = False
    token_ids: bool = False  # requested by the client
    names: TokenNames | None = None  # of tokens; None: no log probabilities
    reasoning_tokens: Callable[[], int | None] = lambda: None  # so far; None: not counted
    # Tokens of the prompt of the answer of an index whose KV the servers still had, known once the answer has begun.
    cached_tokens: Callable[[int], int] = lambda index: 0
    # Log probabilities of the prompt of the answer of an index; None: not requested.
    prompt_logprobs: Callable[[int], PromptEntries] | None = None
    # Tokens of the answer of an index so far, for the usage in each event; None: not requested.
    tokens_so_far: Callable[[int], int] | None = None

    def usage_of(self, index: int, completion: int) -> dict[str, Any]:
        """Return the usage of one answer, without reasoning tokens."""
        first = index - index % self.answers_per_prompt  # which computed the prompt
        return _counts(len(self.prompts[index]), self.cached_tokens(first), completion)

    def usage(self, completion: int) -> dict[str, Any]:
        firsts = range(0, len(self.prompts), self.answers_per_prompt)
        cached = sum(map(self.cached_tokens, firsts))
        counts = _counts(sum(len(self.prompts[at]) for at in firsts), cached, completion)
        reasoning = self.reasoning_tokens()
        if reasoning is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return counts


def _counts(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def keepalive_comment(reason: str) -> bytes:
    """Return a comment that clients skip; it shows people and proxies that the stream is alive. `reason` may be ""."""
    fields = f" for a route: {' '.join(reason.split())}" if reason else ""
    return f": waiting{fields}\n".encode()  # no blank line: for some clients that ends an event


def error_event(envelope: object) -> bytes:
    return b"data: " + json.dumps(envelope).encode() + b"\n\n"


class _EventWriter:
    """Writes `data: {` + the common fields + one choice + `}`."""

    def __init__(
        self, head: ResponseHead, prefix: str, kind: str, index: int, first: ResponseBuilder | None
    ) -> None:
        self.head = head
        self.index = index
        self.id = f"{prefix}-{secrets.token_hex(12)}" if first is None else first.id
        model = json.dumps(head.model)
        self._common = (
            f'"id":"{self.id}","object":"{kind}","created":{head.created},"model":{model}'
        )
        self._no_usage = ',"usage":null' if head.usage_in_stream else ""
        self.add_once = ""  # fields that only the next choice has
        self._start = f'data: {{{self._common},"choices":[{{"index":{index},'

    @property
    def prompt_ids(self) -> str:
        """Return the field with the tokens of the answer's prompt."""
        return f'"prompt_token_ids":{json.dumps(list(self.head.prompts[self.index]))}'

    def opening_event(self, fields: str) -> bytes:
        """Return the event before the first token, which may have been generated already."""
        return f"{self._start}{fields}}}]{self._usage_field(0)}}}\n\n".encode()

    def choice(self, fields: str, tokens: Tokens = (), event_id: str = "") -> bytes:
        """Return an event. `fields`: the inside of the choice's JSON object, without its index."""
        mark = f"id: {event_id}\n" if event_id else ""
        ids = f',"token_ids":{json.dumps(list(tokens))}' if self.head.token_ids and tokens else ""
        once, self.add_once = self.add_once, ""
        return f"{mark}{self._start}{fields}{once}{ids}}}]{self._usage_field()}}}\n\n".encode()

    def _usage_field(self, completion: int | None = None) -> str:
        count = self.head.tokens_so_far
        if count is None:
            return self._no_usage
        if completion is None:
            completion = count(self.index)
        usage = self.head.usage_of(self.index, completion)
        return f',"usage":{json.dumps(usage)}'

    def with_prompt_ids(self, event: bytes) -> bytes:
        """Return the event of a choice with the tokens of the prompt as a field of the event."""
        return event.replace(b"data: {", f"data: {{{self.prompt_ids},".encode(), 1)

    def usage(self, completion: int) -> bytes:
        """Return the usage event, if the client requested it, and the end mark."""
        if not self.head.usage_in_stream:
            return DONE
        usage = json.dumps(self.head.usage(completion))
        return f'data: {{{self._common},"choices":[],"usage":{usage}}}\n\n'.encode() + DONE


class ResponseBuilder(abc.ABC):
    """Builds events and body of one kind of response; the kinds differ in how a choice carries its output."""

    prefix: ClassVar[str]  # of ids
    kind: ClassVar[str]  # of whole responses
    kind_of_event: ClassVar[str]
    nothing: ClassVar[str]  # field of an event without output

    def __init__(
        self, head: ResponseHead, index: int = 0, first: ResponseBuilder | None = None
    ) -> None:
        """Build the choice of this index; `first`: the builder of choice 0, whose id all choices have."""
        self._events = _EventWriter(head, self.prefix, self.kind_of_event, index, first)

    @property
    def id(self) -> str:
        return self._events.id

    def opening(self) -> bytes:
        """Begin the stream: return the event before the first text; may be empty."""
        if self._events.head.token_ids:
            self._events.add_once = f",{self._events.prompt_ids}"
        return b""

    @abc.abstractmethod
    def _event_field(self, output: Events) -> str:
        """Return the field of an event with this output."""

    @abc.abstractmethod
    def _whole_field(self, output: Events) -> dict[str, Any]:
        """Return the field of a whole choice with this output."""

    @abc.abstractmethod
    def _format_logprobs(self, logprobs: Logprobs, names: TokenNames) -> dict[str, Any]: ...

    def output_event(
        self, output: Events, tokens: Tokens, event_id: str, logprobs: Logprobs = ()
    ) -> bytes:
        """Return the event of some output. `event_id`: the last log position that it covers (R17, sampling)."""
        found = self._logprobs(logprobs)
        shown = "null" if found is None else json.dumps(found, default=list)
        fields = f'{self._event_field(output)},"logprobs":{shown},"finish_reason":null'
        return self._events.choice(fields, tokens, event_id)

    def finish_event(self, finish: str) -> bytes:
        """Return the event with the finish reason of this choice."""
        return self._events.choice(f'{self.nothing},"logprobs":null,"finish_reason":"{finish}"')

    def end_events(self, completion: int) -> bytes:
        """Return the end of the stream: the usage if it was requested, and the end mark."""
        return self._events.usage(completion)

    def choice(
        self, output: Events, tokens: Tokens, finish: str, logprobs: Logprobs = ()
    ) -> dict[str, Any]:
        """Return the whole choice, for a response that is not streamed."""
        return {
            "index": self._events.index,
            **self._whole_field(output),
            "logprobs": self._logprobs(logprobs),
            "finish_reason": finish,
            **({"token_ids": list(tokens)} if self._events.head.token_ids else {}),
            **self._choice_fields(),
        }

    def _prompt_fields(self) -> dict[str, Any]:
        """Return the fields with the prompt of a choice, as vLLM names them."""
        head, index = self._events.head, self._events.index
        made: dict[str, Any] = {}
        if head.token_ids:
            made["prompt_token_ids"] = list(head.prompts[index])
        if head.prompt_logprobs is not None:
            made["prompt_logprobs"] = head.prompt_logprobs(index)
        return made

    def _choice_fields(self) -> dict[str, Any]:
        """Return those that a choice has."""
        return {}

    def _body_fields(self) -> dict[str, Any]:
        """Return those that a body has, because all choices have the same prompt."""
        return {}

    def body(self, choices: Sequence[dict[str, Any]], completion: int) -> dict[str, Any]:
        """Return the whole response of a request that does not stream. `completion`: tokens of all choices."""
        head = self._events.head
        made: dict[str, Any] = {"id": self.id, "object": self.kind, "created": head.created}
        made |= {"model": head.model, "choices": list(choices), "usage": head.usage(completion)}
        return made | self._body_fields()

    def _logprobs(self, logprobs: Logprobs) -> dict[str, Any] | None:
        names = self._events.head.names
        return None if names is None else self._format_logprobs(logprobs, names)


class ChatResponseBuilder(ResponseBuilder):
    prefix, kind, kind_of_event = "chatcmpl", "chat.completion", "chat.completion.chunk"
    nothing = '"delta":{}'

    def opening(self) -> bytes:
        fields = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        event = self._events.opening_event(fields)
        return self._events.with_prompt_ids(event) if self._events.head.token_ids else event

    def _body_fields(self) -> dict[str, Any]:
        return self._prompt_fields()

    def _event_field(self, output: Events) -> str:
        match output:
            case [TextDelta(text)]:  # most events: a string needs a fifth of the time of an object
                return f'"delta":{{"content":{json.dumps(text)}}}'
            case _:
                return f'"delta":{json.dumps(chat_delta(output))}'

    def _whole_field(self, output: Events) -> dict[str, Any]:
        return {"message": chat_message(output)}

    def _format_logprobs(self, logprobs: Logprobs, names: TokenNames) -> dict[str, Any]:
        return chat_logprobs(logprobs, names)


class CompletionResponseBuilder(ResponseBuilder):
    prefix, kind, kind_of_event = "cmpl", "text_completion", "text_completion"
    nothing = '"text":""'

    def _choice_fields(self) -> dict[str, Any]:
        return self._prompt_fields()

    def _event_field(self, output: Events) -> str:
        return f'"text":{json.dumps(_text(output))}'

    def _whole_field(self, output: Events) -> dict[str, Any]:
        return {"text": _text(output)}

    def _format_logprobs(self, logprobs: Logprobs, names: TokenNames) -> dict[str, Any]:
        return completion_logprobs(logprobs, names)


def _text(output: Events) -> str:
    """Return the text of an answer that has nothing but text."""
    return "".join(event.text for event in output if isinstance(event, TextDelta))
