"""A session over `Inference.Session`: opened with all its room, stepped by token ids, rewound, closed.

A lost connection is repaired inside a step: the session is attached again, at whichever gateway answers, or built again
from its log. The step is repeated with the same seed, so that the caller sees the same tokens, each once. One thread at
a time uses a session. Knows no tensors and no texts.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from modelswarm.client.integers import is_integer
from modelswarm.client.sessions.base import MAX_TRIES, MESSAGE_BYTES, SessionBase
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.client.sessions.errors import (
    ConnectionLostError,
    SessionLengthError,
    SessionLostError,
)
from modelswarm.errors import UserError
from modelswarm.protocol.wire import api_pb2

_MAX_TOKEN = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of a step's answer."""

    tokens: tuple[int, ...]
    finish_reason: str  # "stop" or "length" in the last part, else empty
    logits: api_pb2.Tensor | None = None
    hidden_states: api_pb2.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The whole answer of a step."""

    tokens: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Parameters of one step's answer."""

    max_tokens: int | None = None  # None: up to the session's max_length; 0: only read the input
    sampling: api_pb2.Sampling | None = None  # None: the model's defaults
    ignore_eos: bool = False  # the model's own end tokens do not end the answer
    return_logits: bool = False
    return_hidden_states: bool = False
    all_positions: bool = False  # rows of the whole input, not only of its last entry


@dataclass(frozen=True, slots=True)
class Prefix:
    """Rows in place of embeddings that stand before the first token of a session."""

    count: int
    model: ServedModel
    rows: bytes
    has_block_rows: bool = False  # each row is followed by one for each block, which adds it there

    def as_step(self, start: int) -> api_pb2.SessionStep:
        """Return a step with rows from `start` on, as many as one message holds."""
        each = (1 + self.model.n_blocks,) if self.has_block_rows else ()
        size = len(self.rows) // self.count
        end = min(self.count, start + max(1, MESSAGE_BYTES // size))
        shape = (end - start, *each, self.model.hidden_size)
        data = self.rows[start * size : end * size]
        tensor = api_pb2.Tensor(dtype=self.model.dtype, shape=shape, data=data)
        return api_pb2.SessionStep(hidden_states=tensor, max_tokens=0)


class GatewaySession(SessionBase):
    """A context of at most `max_length` positions, prompts and answers together.

    All positions are reserved on every server when the session is opened. They are freed when it is closed or collected
    as garbage, when its `with` block ends, and when the process ends.
    """

    def __init__(
        self,
        connection: Connection,
        model: str,
        max_length: int,
        *,
        ttl: int | None = None,
        prefix: Prefix | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the session. `ttl`: seconds that it is kept without a step. `prefix`: counts in no position.

        Raise NoCapacityError if the servers have no room, RefusedError for an impossible max_length,
        UnreachableError if no gateway answers.
        """
        self._prefix, self._before = prefix, 0 if prefix is None else prefix.count
        super().__init__(
            connection, model, max_length, ttl=ttl, more_positions=self._before, clock=clock
        )
        self._log: list[int] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """The log: all input and generated tokens."""
        return tuple(self._log)

    @property
    def position(self) -> int:
        """Number of tokens in the log. Assign a smaller one to rewind; what is behind it is discarded."""
        return len(self._log)

    @position.setter
    def position(self, value: int) -> None:
        self.rewind(value)

    def rewind(self, position: int) -> None:
        """Discard the log behind `position`. The servers do so with the next step."""
        with self._used():
            self._check_position(position)
            del self._log[position:]

    def fork(self, position: int | None = None) -> GatewaySession:
        """Open another session with the first `position` tokens of the log, by default all.

        The fork has that position, and this session's max_length and ttl. The servers copy the KV. Both go on
        independently, and closing one leaves the other. If its gateway or servers are lost meanwhile, the fork's
        first step reads its log again.

        Raise NoCapacityError if the servers have no room, SessionClosedError, SessionBusyError, and UserError for a
        position that the session has not. This session stays as it is.
        """
        with self._used():
            end = len(self._log) if position is None else position
            self._check_position(end)
            self._drain()
            made = copy(self)
            made._lock = threading.Lock()
            made._log = self._log[:end]
            whole = self._before + end
            can_copy = end > 0 and whole <= self._stream.position
            made._stream = made._open_fork(self.session_id, whole) if can_copy else made._open()
            return made

    def step(self, tokens: Sequence[int], options: StepOptions | None = None) -> Iterator[StepPart]:
        """Append `tokens` and yield the parts of the answer as they come.

        Without tokens the answer goes on behind the log. Nothing is sent before the first part is asked for. A caller
        that leaves early keeps the tokens that it has seen.

        Raise SessionLengthError, SessionClosedError, SessionBusyError, RefusedError, SessionLostError.
        """
        wanted = options or StepOptions()
        with self._used():
            self._check(tokens, wanted)
            self._drain()
            if wanted.max_tokens == 0 and not tokens:
                return
            yield from self._run(list(tokens), _with_seed(wanted))

    def run_step(self, tokens: Sequence[int], options: StepOptions | None = None) -> StepResult:
        """Append `tokens` and return the whole answer."""
        parts = list(self.step(tokens, options))
        found = tuple(token for part in parts for token in part.tokens)
        return StepResult(found, parts[-1].finish_reason if parts else "length")

    def read_rows(
        self,
        tokens: Sequence[int],
        *,
        logits: bool = True,
        hidden_states: bool = False,
        all_positions: bool = False,
    ) -> list[StepPart]:
        """Append `tokens` and return the rows behind the last one of them, or behind each.

        Each part has some rows, in order: logits [rows, vocabulary], hidden states [rows, hidden]. A repeated step may
        have more of them at the beginning. Raise as `step` does.
        """
        with self._used():
            options = StepOptions(
                0,
                return_logits=logits,
                return_hidden_states=hidden_states,
                all_positions=all_positions,
            )
            self._check(tokens, options)
            self._drain()
            before, tries = list(self._log), MAX_TRIES
            while True:
                try:
                    parts = list(self._attempt(before, list(tokens), options))
                except (ConnectionLostError, SessionLostError) as error:
                    tries -= 1
                    if not tries:
                        raise
                    self._recover(error)
                    continue
                self._log = before + list(tokens)
                return parts

    # ---- inside

    def _check_position(self, position: int) -> None:
        if not is_integer(position) or not 0 <= position <= len(self._log):
            detail = f"allowed: 0 to {len(self._log)}, the session's position"
            raise UserError("position", f"{position!r}; {detail}")

    def _check(self, tokens: Sequence[int], options: StepOptions) -> None:
        for token in tokens:
            if not 0 <= token <= _MAX_TOKEN:
                raise UserError("tokens", f"{token} is no token id; allowed: 0 to {_MAX_TOKEN}")
        if options.max_tokens is not None and options.max_tokens < 0:
            raise UserError("max_tokens", f"{options.max_tokens}; allowed: 0 or more")
        least = 1 if options.max_tokens is None else options.max_tokens
        if (
            not tokens
            and not self._log
            and (least or options.return_logits or options.return_hidden_states)
        ):
            raise UserError("tokens", "the session is empty; its first step needs at least one")
        end = len(self._log) + len(tokens) + least
        if end > self.max_length:
            parts = f"{len(self._log)} in the log, {len(tokens)} of input and {least} to generate"
            detail = f"{parts} are {end}, and max_length is {self.max_length}"
            raise SessionLengthError("max_length", f"maximum length exceeded: {detail}")

    def _run(self, tokens: list[int], options: StepOptions) -> Iterator[StepPart]:
        """Yield the parts. After a lost connection go on behind the last one that was yielded."""
        before, seen, tries = list(self._log), 0, MAX_TRIES
        while True:
            known = seen  # tokens that the caller has, and a repeated step sends again
            try:
                for part in self._attempt(before, tokens, options):
                    fresh = part.tokens[known:]
                    known -= len(part.tokens) - len(fresh)
                    if fresh and not seen:
                        self._log += tokens
                    self._log += fresh
                    seen += len(fresh)
                    tries = MAX_TRIES if fresh else tries
                    if fresh or part.finish_reason:
                        yield StepPart(fresh, part.finish_reason)
                self._log = self._log if seen else before + tokens
                return
            except (ConnectionLostError, SessionLostError) as error:
                tries -= 1
                if not tries:
                    raise
                self._recover(error)

    def _attempt(
        self, before: list[int], tokens: list[int], options: StepOptions
    ) -> Iterator[StepPart]:
        """Send the step, and yield all parts of its answer."""
        if not self._stream.end.alive:  # an error has ended it
            self._recover(SessionLostError("the session's call has ended"))
        log = before + tokens
        stream = self._stream
        self._send_prefix()
        start = min(stream.position - self._before, len(before), len(log) - 1)
        if self._before + start < stream.position:
            stream.ask(rewind=api_pb2.Rewind(position=self._before + start))
        fields: dict[str, Any] = {
            "ignore_eos": options.ignore_eos,
            "return_logits": options.return_logits,
            "return_hidden_states": options.return_hidden_states,
            "all_positions": options.all_positions,
        }
        if options.max_tokens is not None:
            fields["max_tokens"] = options.max_tokens
        if options.sampling is not None:
            fields["sampling"] = options.sampling
        stream.send(step=api_pb2.SessionStep(tokens=api_pb2.TokenIds(ids=log[start:]), **fields))
        stream.is_in_step = True
        stream.left = self.max_length if options.max_tokens is None else options.max_tokens
        while stream.is_in_step:
            yield _step_part(stream.receive_part())

    def _send_prefix(self) -> None:
        """Bring a session that is new, or has a part of the prefix, to the end of the prefix."""
        stream = self._stream
        while self._prefix is not None and stream.position < self._before:
            stream.send(step=self._prefix.as_step(stream.position))
            stream.is_in_step = True
            while stream.is_in_step:
                stream.receive_part()


def _step_part(part: api_pb2.GenerateResponse) -> StepPart:
    logits = part.logits if part.HasField("logits") else None
    states = part.hidden_states if part.HasField("hidden_states") else None
    return StepPart(tuple(part.token_ids), part.finish_reason, logits, states)


def _with_seed(options: StepOptions) -> StepOptions:
    """Return the options with a seed, so that a repeated step draws the same tokens."""
    sampling = api_pb2.Sampling()
    if options.sampling is not None:
        sampling.CopyFrom(options.sampling)
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(63)
    return replace(options, sampling=sampling)
