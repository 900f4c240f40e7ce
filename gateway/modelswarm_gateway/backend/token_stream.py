"""The stream of one turn's tokens and returned rows, from the backend to one reader.

Filled by the node, read by a generation. Knows neither text nor sessions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from modelswarm.protocol.messages import Finish, PromptLogprob, TopLogprob
from modelswarm_gateway.errors import ApiError


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token, the log entry at `position`; token -1 if the turn only read its prompt."""

    position: int
    token: int
    finish: Finish
    logprob: float = 0.0
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RowsEvent:
    """Returned rows of the log entries from `start` on; they come before the token of the entry after them."""

    start: int
    payload: bytes


StreamEvent: TypeAlias = TokenEvent | RowsEvent


class TokenStream:
    """The tokens of one turn for one reader. It holds at most the tokens that the credit let through."""

    def __init__(self, read_to: Callable[[int], None], stop_at: Callable[[int], None]) -> None:
        """`read_to` is called with the position below which the client has everything. `stop_at` ends the turn and
        keeps that many log entries."""
        self.read_to = read_to
        self.stop_at = stop_at
        # Of the prompt's entries from position 1 on; complete before the first event.
        self.prompt_logprobs: list[PromptLogprob] = []
        self._events: deque[StreamEvent] = deque()
        self._failure: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.has_begun = False  # a token was added
        self.has_ended = False  # no more events will be added
        self.reroutes = 0  # faults that made the session look for a new route
        self.fault_cause = ""  # of the first fault since its last token

    def add_event(self, event: TokenEvent) -> None:
        if self.has_ended:
            return
        self._events.append(event)
        self.has_begun = True
        if event.finish is not Finish.NONE:
            self.has_ended = True
        self._wake()

    def add_rows(self, event: RowsEvent) -> None:
        if not self.has_ended:
            self._events.append(event)
            self._wake()

    def fail(self, error: ApiError) -> None:
        """End the turn with an error, raised after the events added before. Later failures are ignored."""
        if not self.has_ended:
            self.has_ended = True
            self._failure = error
            self._wake()

    def abort(self, error: ApiError) -> None:
        """End the turn at once with an error; unread events are dropped."""
        self._events.clear()
        self.has_ended = True
        self._failure = error
        self._wake()

    async def next_events(self, timeout: float) -> Sequence[StreamEvent]:
        """Wait for events and return all that have arrived; empty after `timeout` seconds. One reader only.

        Raise the ApiError that ended the turn.
        """
        if not self._events and self._failure is None:
            await self._wait(timeout)
        if self._events:
            events = tuple(self._events)
            self._events.clear()
            return events
        if self._failure is not None:
            raise self._failure
        return ()

    async def _wait(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
