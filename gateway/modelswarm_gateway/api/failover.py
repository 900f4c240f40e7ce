"""Failover of a stream between gateways: retry budget and pauses of one answer (R20, takeover).

Used by both APIs around each try to answer. Knows neither HTTP nor gRPC, nor the gateway that answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from modelswarm_gateway.api.forwarding import PeerGone
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.session_locator import WAIT_SECONDS

FIRST_PAUSE, MAX_PAUSE = 0.1, 1.0  # seconds between two tries
# Errors in the middle of an answer after which it goes on at another gateway.
MOVED_CODES = (Code.SESSION_ELSEWHERE, Code.STOPPING)
# Errors of a retry after which another retry may succeed.
RETRYABLE_CODES = (*MOVED_CODES, Code.SESSION_BUSY, Code.NO_CAPACITY, Code.NO_SERVERS)


def stream_broken() -> ApiError:
    detail = "the gateway that owned this session was lost; resume with Last-Event-ID"
    return ApiError(Code.STREAM_BROKEN, detail, param="session_id")


class StreamFailover:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline: float | None = None  # None: no failure since the last delivery
        self._pause = FIRST_PAUSE
        self.has_begun = False  # something was delivered to the client

    def on_delivered(self) -> None:
        """Record that the client got more of the answer: the retry budget starts anew."""
        self.has_begun = True
        if self._deadline is not None:
            self._deadline, self._pause = None, FIRST_PAUSE

    async def before_retry(self, error: ApiError | PeerGone) -> None:
        """Sleep before the next attempt.

        Re-raise the error if it is the first refusal, not retryable, or the retry budget is used up.
        """
        if isinstance(error, ApiError) and (
            self._deadline is None or error.code not in RETRYABLE_CODES
        ):
            raise error
        now = self._clock()
        if self._deadline is None:
            self._deadline = now + WAIT_SECONDS
        elif now >= self._deadline:
            if isinstance(error, ApiError) and not self.has_begun:
                raise error
            raise stream_broken() from error
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, MAX_PAUSE)
