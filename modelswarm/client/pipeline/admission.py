"""Places for the prompts of a pipeline that run at a time: fewer after refusals for want of room.

Additive increase, multiplicative decrease, as TCP does. Used within one event loop. Callers are served in order.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Admission:
    """Places for prompts that run; all runs of a pipeline share them."""

    def __init__(self, most: int) -> None:
        self._most, self._limit = most, float(most)
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """Places at this moment, at least one."""
        return int(self._limit)

    @property
    def running(self) -> int:
        return self._running

    async def enter(self) -> None:
        """Wait for a place, and take it."""
        if self._running < self.limit and not self._waiting:
            self._running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # the place was given already
            elif turn in self._waiting:  # else a place that was free meanwhile has passed it over
                self._waiting.remove(turn)
            raise

    def leave(self) -> None:
        """Give a place back."""
        self._running -= 1
        self._admit()

    def raise_limit(self) -> None:
        """After an answer: one more place for every round of answers, up to the most."""
        self._limit = min(self._most, self._limit + 1 / self._limit)
        self._admit()

    def lower_limit(self) -> None:
        """After a refusal: half of the prompts that run, and at least one."""
        self._limit = float(max(1, self._running // 2))

    def _admit(self) -> None:
        while self._waiting and self._running < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)
