"""The tokens of one row of a batch as the servers sample them: of an answer by itself, or of a session's turn.

An answer whose connection breaks goes on behind its last token, by a new request with the received tokens in its
prompt. Noise and penalties depend only on the tokens before, so it gives the same ones. Knows no tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import grpc

from modelswarm.client.sessions.base import RECONNECT_SECONDS, RETRY_SECONDS
from modelswarm.client.sessions.connection import Connection
from modelswarm.client.sessions.errors import ConnectionLostError, NoCapacityError, translate
from modelswarm.client.sessions.session import (
    GatewaySession,
    StepOptions,
    StepPart,
)
from modelswarm.errors import ModelSwarmError, UnavailableError
from modelswarm.protocol.wire import api_pb2

CHUNK_TOKENS = 16
"""Tokens of one step of a session whose turn the client may end. The rest of the last one is discarded."""


ROOM_SECONDS = 30.0
"""Seconds after the end of other rows for which a row without room tries again."""


class TokenRow(Protocol):
    """One row of a batch."""

    def next_token(self) -> int | None:
        """Return the next token; None after the last one that the servers send."""

    def leave(self) -> None:
        """End the row behind the last token that was returned."""


class AnswerRow:
    """An answer to a prompt, without a session."""

    def __init__(
        self,
        connection: Connection,
        request: api_pb2.GenerateRequest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection, self._request, self._clock = connection, request, clock
        self._tokens: list[int] = []  # received ones
        self.refusal: NoCapacityError | None = None
        self._used = 0
        self._is_over = False
        self._call: Any = connection.stream(request)

    def next_token(self) -> int | None:
        while self._used == len(self._tokens) and not self._is_over:
            self._read()
        if self._used == len(self._tokens):
            return None
        self._used += 1
        return self._tokens[self._used - 1]

    def begin(self, *, again: bool = False) -> bool:
        """Wait for the first part. Return False if the servers have no room now."""
        if again:
            self._call = self._connection.stream(self._request)
        try:
            if not self._tokens and not self._is_over:
                self._read()
        except NoCapacityError as error:
            self.refusal = error
            return False
        return True

    def fetch_all(self) -> None:
        """Read the answer to its end."""
        while not self._is_over:
            self._read()

    def leave(self) -> None:
        self._is_over = True
        self._call.cancel()

    def _read(self) -> None:
        """Read one part. A connection that breaks is repaired until the deadline."""
        deadline = self._clock() + RECONNECT_SECONDS
        part: api_pb2.GenerateResponse | None = None
        while part is None:
            try:
                part = next(self._call)
            except grpc.RpcError as error:
                failure = translate(error, self._connection.target)
                self._repair(failure, deadline)
        self._tokens += part.token_ids
        self._is_over = bool(part.finish_reason)

    def _repair(self, failure: ModelSwarmError, deadline: float) -> None:
        """Ask for the tokens behind the last one. Raise `failure` if nothing came yet, or at the deadline."""
        pause = max(RETRY_SECONDS, getattr(failure, "retry_after", 0.0))
        is_passing = isinstance(failure, (ConnectionLostError, UnavailableError))
        if not self._tokens or not is_passing or self._clock() + pause > deadline:
            raise failure
        time.sleep(pause)
        rest = api_pb2.GenerateRequest()
        rest.CopyFrom(self._request)
        count = len(self._tokens)
        rest.tokens.ids.extend(self._tokens)
        rest.max_tokens = max(0, rest.max_tokens - count)
        rest.sampling.min_tokens = max(0, rest.sampling.min_tokens - count)
        self._call = self._connection.stream(rest)


def start_answers(
    connection: Connection, requests: Sequence[api_pb2.GenerateRequest]
) -> list[AnswerRow]:
    """Start all answers at once, and return them when each has begun.

    An answer without room begins after the end of the others, which are read meanwhile. Raise NoCapacityError if none
    has room.
    """
    rows = [AnswerRow(connection, request) for request in requests]
    try:
        waiting = [row for row in rows if not row.begin()]
        if rows and len(waiting) == len(rows):
            _raise_refusal(waiting)
        deadline = time.monotonic() + ROOM_SECONDS
        while waiting:
            for row in rows:
                if row not in waiting:
                    row.fetch_all()
            begun = [row for row in waiting if row.begin(again=True)]
            if begun:
                deadline = time.monotonic() + ROOM_SECONDS
            elif time.monotonic() > deadline:
                _raise_refusal(waiting)
            else:
                time.sleep(RETRY_SECONDS)  # the servers free the room of the others
            waiting = [row for row in waiting if row not in begun]
    except BaseException:
        for row in rows:
            row.leave()
        raise
    return rows


def _raise_refusal(rows: Sequence[AnswerRow]) -> NoReturn:
    refusal = rows[0].refusal
    assert refusal is not None
    raise refusal


class SessionRow:
    """A turn of a session. `can_end`: the client may end it before the servers do."""

    def __init__(
        self,
        session: GatewaySession,
        tokens: list[int],
        max_tokens: int,
        sampling: api_pb2.Sampling,
        *,
        can_end: bool,
    ) -> None:
        self._session, self._sampling = session, sampling
        self._left = max_tokens  # tokens that no step was asked for yet
        self._chunk = CHUNK_TOKENS if can_end else max_tokens
        self._used = session.position + len(
            tokens
        )  # position behind the last token that was returned
        self._buffer: deque[int] = deque()
        self._parts = self._step(tokens)
        self._finish = ""

    def next_token(self) -> int | None:
        while not self._buffer:
            part = next(self._parts, None)
            if part is not None:
                self._buffer += part.tokens
                self._finish = part.finish_reason
            elif self._left and self._finish == "length":
                self._parts = self._step([])
            else:
                return None
        self._used += 1
        return self._buffer.popleft()

    def leave(self) -> None:
        self._parts.close()  # type: ignore[attr-defined]
        if self._session.position > self._used:
            self._session.rewind(self._used)

    def _step(self, tokens: list[int]) -> Iterator[StepPart]:
        count = min(self._chunk, self._left)
        self._left -= count
        sampling = api_pb2.Sampling()
        sampling.CopyFrom(self._sampling)
        self._sampling.min_tokens = max(0, self._sampling.min_tokens - count)
        return self._session.step(tokens, StepOptions(count, sampling, ignore_eos=True))
