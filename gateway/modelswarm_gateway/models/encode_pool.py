"""Queue of a model's large requests: one runs at a time, and few over all models, because all share the memory.

A tokenizer needs some 200 bytes for each character. Small requests do not come here. Knows no tokenizers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Large requests of all models at a time.
MAX_LARGE_REQUESTS = 2
# Large requests of a model that wait.
MAX_WAITING_TEXTS = 64
# Characters of all texts of a model that wait or are tokenized.
MAX_CHARACTERS = 32 << 20

T = TypeVar("T")


class TooManyTexts(Exception):
    """As many large requests wait as may."""

    def __init__(self) -> None:
        super().__init__("too many long prompts are being tokenized; retry in 1 s")


class EncodePool:
    """A place belongs to a request until its thread has ended, even if the client has left."""

    def __init__(self, shared: asyncio.Semaphore | None = None) -> None:
        """`shared`: places that all models share; by default of its own."""
        self._turn = asyncio.Semaphore(1)  # so that one model never holds two places
        self._places = shared or asyncio.Semaphore(MAX_LARGE_REQUESTS)
        self._thread = ThreadPoolExecutor(1, "large-requests")
        self._waiting = self._characters = 0

    async def run(self, work: Callable[[], T], characters: int) -> T:
        """Return what `work` returns, run in a thread once there is a place. Raise TooManyTexts."""
        is_full = self._characters and self._characters + characters > MAX_CHARACTERS
        if self._waiting >= MAX_WAITING_TEXTS or is_full:
            raise TooManyTexts
        self._waiting += 1
        self._characters += characters
        try:
            await self._take_place()
        except BaseException:
            self._characters -= characters
            raise
        finally:
            self._waiting -= 1
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        running.add_done_callback(lambda done: self._free_place(done, characters))
        return await asyncio.shield(running)

    async def _take_place(self) -> None:
        await self._turn.acquire()
        try:
            await self._places.acquire()
        except BaseException:
            self._turn.release()
            raise

    def _free_place(self, done: asyncio.Future[T], characters: int) -> None:
        self._characters -= characters
        self._places.release()
        self._turn.release()
        if not done.cancelled():
            done.exception()  # the client may have left: then no other code reads it
