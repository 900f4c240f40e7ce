"""An event loop in a thread of its own: synchronous callers run coroutines in it, also inside another event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar

from modelswarm.client.api.errors import ClosedClientError

Result = TypeVar("Result")
_END = object()


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
        if self._loop.is_closed():
            coroutine.close()
            raise ClosedClientError("the client is closed; make a new one")
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ClosedClientError(
                "a synchronous call would wait for itself; use the async client"
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, generator: AsyncGenerator[Result, None]) -> Generator[Result, None, None]:
        """Yield the items of an asynchronous generator, which is closed when the caller leaves."""
        try:
            while True:
                item = self.call(_next(generator))
                if item is _END:
                    return
                yield item
        finally:
            if not self._loop.is_closed():
                self.call(generator.aclose())

    def close(self) -> None:
        """End the thread. Nothing may run in it any more."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(generator: AsyncGenerator[Any, None]) -> Any:
    return await anext(generator, _END)
