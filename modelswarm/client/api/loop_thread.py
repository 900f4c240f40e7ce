"""An event loop in a thread of its own: synchronous callers run coroutines in it, also inside another event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from modelswarm.client.api.errors import ClosedClientError

Result = TypeVar("Result")
READ_AHEAD = 64  # items of a generator that wait for their reader


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None  # that ended the generator; None: it has no more items


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run the coroutine in the thread; return its result. An interrupt of the caller cancels it."""
        try:
            self._check_caller()
        except ClosedClientError:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, generator: AsyncGenerator[Result, None]) -> Generator[Result, None, None]:
        """Yield the items of an asynchronous generator, which is closed when the caller leaves."""
        self._check_caller()
        pump = _Pump(generator, self._loop)
        running = asyncio.run_coroutine_threadsafe(pump.run(), self._loop)
        try:
            yield from pump.items()
        finally:
            running.cancel()
            if not self.is_closed:
                self.call(pump.ended.wait())

    def close(self) -> None:
        """End the thread, and everything that runs in it."""
        if self.is_closed:
            return
        self.call(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_caller(self) -> None:
        if self.is_closed:
            raise ClosedClientError("the client is closed; make a new one")
        if threading.current_thread() is self._thread:
            detail = "a synchronous call would wait for itself here; use the asynchronous client"
            raise ClosedClientError(detail)


class _Pump(Generic[Result]):
    """Moves the items of a generator into the thread of their reader, at most READ_AHEAD of them ahead."""

    def __init__(
        self, generator: AsyncGenerator[Result, None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._generator = generator
        self._loop = loop
        self._room = asyncio.Semaphore(READ_AHEAD)
        self._items: queue.SimpleQueue[Result | _End] = queue.SimpleQueue()
        self.ended = asyncio.Event()  # the generator is closed

    async def run(self) -> None:
        error: BaseException | None = None
        try:
            async with aclosing(self._generator) as items:
                async for item in items:
                    self._items.put(item)
                    await self._room.acquire()
        except asyncio.CancelledError:
            error = ClosedClientError("the client was closed while its stream was read")
            raise
        except Exception as raised:
            error = raised
        finally:
            self._items.put(_End(error))
            self.ended.set()

    def items(self) -> Generator[Result, None, None]:
        """Yield the items in the reader's thread. Raise the error of the generator."""
        taken = 0
        while True:
            item = self._items.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            taken += 1
            if taken == READ_AHEAD // 2:
                self._loop.call_soon_threadsafe(self._make_room, taken)
                taken = 0
            yield item

    def _make_room(self, count: int) -> None:
        for _ in range(count):
            self._room.release()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
