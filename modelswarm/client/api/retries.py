"""The retry budget of one call: which failures are repeated, how often, and the pauses between.

Two budgets. Before an answer has begun: `max_retries` tries. After a break in its middle: RESUME_SECONDS.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from modelswarm.client.api.errors import (
    ApiError,
    ClosedClientError,
    ConnectionBrokenError,
    GatewayUnreachableError,
    NotAGatewayError,
)

RESUME_SECONDS = 90.0  # from a break until the answer is given up; a lost gateway's lease has 30 s
FIRST_PAUSE, MAX_PAUSE = 0.5, 8.0  # seconds between two tries
BREAK_PAUSE = 0.1  # the first one after a break: most often another connection is possible at once
MAX_RETRY_AFTER = 120.0  # seconds; a longer wait is for the caller to decide
# Errors in the middle of a stream that end the stream, but not its turn.
MOVED_CODES = ("gateway_stopping", "session_elsewhere")  # it goes on at another gateway
RESUMABLE_CODES = (*MOVED_CODES, "stream_unread")
_RETRYABLE = (408, 409, 429)  # and 500 or more, of servers without `x-should-retry`
_NOT_STARTED = (429, 503)  # statuses of refusals before the first token
# The same in a stream that began with comments, while the gateway looked for the session.
_NOT_STARTED_CODES = ("no_servers", "no_capacity")

Sleep = Callable[[float], Awaitable[object]]
OnBreak = Callable[[ApiError], None]


class Retries:
    def __init__(
        self,
        max_retries: int,
        *,
        on_break: OnBreak | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._left = max_retries
        self._on_break = on_break
        self._clock, self._sleep = clock, sleep
        self._pause = FIRST_PAUSE
        self._has_begun = False
        self._deadline: float | None = None  # None: no failure since the last progress

    def on_begun(self) -> None:
        """Record that an answer has begun: from now on failures are breaks."""
        if not self._has_begun:
            self._has_begun, self._pause = True, BREAK_PAUSE

    def on_progress(self) -> None:
        """Record that the answer goes on: the budget of breaks starts anew."""
        self._deadline, self._pause = None, BREAK_PAUSE

    async def before_retry(
        self, error: ApiError, *, is_repeatable: bool, is_unanswered: bool = False
    ) -> None:
        """Sleep before the next try. Raise the error if it is final, or if the budget is used up.

        `is_repeatable`: a second execution of the call does no harm. `is_unanswered`: no event of the answer has come.
        """
        in_stream = error.facts.status is None
        is_refused = is_unanswered and in_stream and error.facts.code in _NOT_STARTED_CODES
        if not is_refused and not _is_retryable(error, is_repeatable):
            raise error
        pause = self._pause * random.uniform(0.75, 1.0)
        wanted = error.facts.retry_after
        if wanted is not None:
            if wanted > MAX_RETRY_AFTER:
                raise error
            # A gateway without servers always says 1 s; further tries would then end before a server has started.
            pause = wanted if self._has_begun else max(wanted, pause)
        self._take(error, pause, is_break=self._has_begun and not is_refused)
        self._pause = min(2 * self._pause, MAX_PAUSE)
        await self._sleep(pause)

    def _take(self, error: ApiError, pause: float, *, is_break: bool) -> None:
        """Take one try from the budget, or raise the error."""
        if is_break:
            now = self._clock()
            if self._deadline is None:
                self._deadline = now + RESUME_SECONDS
                if self._on_break is not None:
                    self._on_break(error)
            if now + pause > self._deadline:
                raise error
        elif self._left == 0:
            raise error
        else:
            self._left -= 1


def _is_retryable(error: ApiError, is_repeatable: bool) -> bool:
    facts = error.facts
    if isinstance(error, ConnectionBrokenError):
        return is_repeatable or isinstance(error, GatewayUnreachableError)
    if isinstance(error, ClosedClientError | NotAGatewayError):
        return False
    if facts.status is None:
        return is_repeatable and facts.code in RESUMABLE_CODES
    if not is_repeatable and facts.status not in _NOT_STARTED:
        return False
    if facts.should_retry is not None:
        return facts.should_retry
    return facts.status in _RETRYABLE or facts.status >= 500
