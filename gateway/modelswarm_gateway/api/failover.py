"""The course of one answer that may move from gateway to gateway: how far its reader has it, and for how long a way on
is looked for when whoever gave it is gone (R20).

Used by the doors around each try to answer. Knows neither HTTP nor gRPC, nor who answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from modelswarm_gateway.api.forwarding import PeerGone
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.session_locator import WAIT_SECONDS

FIRST_PAUSE, MAX_PAUSE = 0.1, 1.0  # seconds between two tries
MOVED_CODES = (
    Code.SESSION_ELSEWHERE,
    Code.STOPPING,
)  # said in the middle: the answer goes on elsewhere
RETRYABLE_CODES = (*MOVED_CODES, Code.SESSION_BUSY, Code.NO_CAPACITY, Code.NO_SERVERS)


def stream_broken() -> ApiError:
    detail = "the gateway that holds this session is gone; go on with Last-Event-ID"
    return ApiError(Code.STREAM_BROKEN, detail, param="session_id")


class StreamFailover:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline: float | None = None  # nothing broke since its reader heard something
        self._pause = FIRST_PAUSE
        self.has_begun = False  # its reader has heard of it

    def on_delivered(self) -> None:
        """Its reader has more of it."""
        self.has_begun = True
        if self._deadline is not None:
            self._deadline, self._pause = None, FIRST_PAUSE

    async def before_retry(self, error: ApiError | PeerGone) -> None:
        """Pauses before the next try. Raises what the reader is to hear if there is none: a first refusal stands, as
        does one that no later try would change."""
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
