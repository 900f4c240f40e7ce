"""Answers of the Python client: completions, chats, chunks of streams, models, sessions. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the gateway serves."""

    name: str
    max_length: int | None = None  # positions of its context; None: not known yet
    ready: bool | None = None  # all its blocks are held; None: the server does not say
    chat_problem: str | None = None  # the sentence that chats are refused with
    vocab_size: int | None = None  # token ids are below it; None: not known yet
    parent: str | None = None  # the model that it is an adapter of; None: it is a model


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens. After a turn of a session `total_tokens` is its position."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: int | None = None  # of the answer; None: not counted
    cached_tokens: int | None = (
        None  # of the prompt, whose KV the servers still had; None: not counted
    )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one token, by the model's own distribution."""

    token: str
    logprob: float | None  # natural; None for the first token of a prompt
    top: Mapping[str, float] = field(default_factory=dict)  # the most probable tokens


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model asks for. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A part of a tool call in a stream: the first part of a call has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a streamed answer. The last one has no text, but the usage."""

    text: str = ""
    index: int = 0  # of the answer, with n > 1
    token_ids: tuple[int, ...] = ()  # with return_token_ids
    finish_reason: str | None = None  # "stop", "length" or "tool_calls"; None: more will come
    usage: Usage | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallPart, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None  # with return_token_ids, once

    @property
    def is_empty(self) -> bool:
        """Return whether it has nothing to show: it only opens the stream."""
        return self == Chunk(index=self.index)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to a prompt."""

    index: int
    text: str
    finish_reason: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    # With prompt_logprobs: for each token of the prompt its entry of vLLM's form, the first one None.
    prompt_logprobs: tuple[Mapping[str, Any] | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    request_id: str | None = None  # of the last connection that the answer came over

    @property
    def text(self) -> str:
        """Return the text of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """Return the tokens of the first choice; None without return_token_ids."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Return one entry for each token of the first choice; None without logprobs."""
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class Completion(_Answer):
    """A whole text completion."""


@dataclass(frozen=True, slots=True)
class ChatCompletion(_Answer):
    """A whole answer of a chat."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def reasoning_content(self) -> str | None:
        """Return the reasoning before the text; None if there is none."""
        return self.choices[0].reasoning_content


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The token ids of a prompt."""

    token_ids: tuple[int, ...]
    max_length: int | None  # positions of the model's context
    tokens: tuple[str, ...] | None = None  # with return_token_strs: entries of the vocabulary


@dataclass(frozen=True, slots=True)
class Hop:
    """A part of a session's route: blocks `first` to `last`, without the last, on a server."""

    server: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SessionState:
    """A named session, as its gateway sees it."""

    id: str
    model: str
    state: str
    position: int  # entries of its log
    max_length: int | None  # positions that it may have; None: the model's context
    ttl: int | None  # seconds without a turn until it is dropped; None: the gateway's default
    expires_at: int | None  # unix seconds; None during a turn
    reroutes: int
    route: tuple[Hop, ...]
