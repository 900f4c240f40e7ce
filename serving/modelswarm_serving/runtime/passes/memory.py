"""The memory of all passes of a server: a fixed number of bytes, which calls wait for in their order.

Used by `calls.py`. Knows neither calls nor models.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Reservation:
    """The bytes of one call; it gives them back step by step."""

    def __init__(self, memory: PassMemory, size: int) -> None:
        self._memory, self._size = memory, size

    def shrink(self, size: int) -> None:
        """Keep `size` bytes at most."""
        if size < self._size:
            self._memory.free(self._size - size)
            self._size = size


class PassMemory:
    def __init__(self, limit: int, max_waiting: int) -> None:
        self.limit = limit
        self._left = limit
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_crowded(self) -> bool:
        """True if no further call may wait."""
        return len(self._waiting) >= self._max_waiting

    async def reserve(self, size: int) -> Reservation:
        """Wait until `size` bytes are free, behind all calls that wait, and take them. `size` is at most the limit."""
        if not self._waiting and size <= self._left:
            self._left -= size
            return Reservation(self, size)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.free(size)
            else:
                self._waiting.remove((size, turn))
                self._wake()
            raise
        return Reservation(self, size)

    def free(self, size: int) -> None:
        self._left += size
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._left:
            size, turn = self._waiting.popleft()
            self._left -= size
            turn.set_result(None)
