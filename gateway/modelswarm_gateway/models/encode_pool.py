"""Threads for tokenizing long texts: a few at a time, and a bounded number of texts that wait.

One pool serves all models of a gateway, because all share its memory: a tokenizer needs some 200 bytes for each
character. Knows no tokenizers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Long texts tokenized at a time.
MAX_LONG_ENCODES = 2
# Long texts that wait for a thread.
MAX_WAITING_TEXTS = 64
# Characters of all texts that wait or are tokenized.
MAX_CHARACTERS = 32 << 20

T = TypeVar("T")


class TooManyTexts(Exception):
    """As many long texts wait as may."""

    def __init__(self) -> None:
        super().__init__("too many long prompts are being tokenized; retry in 1 s")


class EncodePool:
    """A place belongs to a text until its thread has ended, even if the client has left: a thread cannot be stopped."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_LONG_ENCODES)
        self._threads = ThreadPoolExecutor(MAX_LONG_ENCODES, "tokenizer")
        self._waiting = self._characters = 0

    async def run(self, work: Callable[[], T], characters: int) -> T:
        """Return what `work` returns, run in a thread once there is a place. Raise TooManyTexts."""
        is_full = self._characters and self._characters + characters > MAX_CHARACTERS
        if self._waiting >= MAX_WAITING_TEXTS or is_full:
            raise TooManyTexts
        self._waiting += 1
        self._characters += characters
        try:
            await self._places.acquire()
        except BaseException:
            self._characters -= characters
            raise
        finally:
            self._waiting -= 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda done: self._free_place(done, characters))
        return await asyncio.shield(running)

    def _free_place(self, done: asyncio.Future[T], characters: int) -> None:
        self._characters -= characters
        self._places.release()
        if not done.cancelled():
            done.exception()  # the client may have left: then no other code reads it
