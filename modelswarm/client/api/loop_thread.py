"""An event loop in a thread of its own: synchronous callers run coroutines in it, also inside another event loop."""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from modelswarm.client.api.errors import ClosedClientError

Result = TypeVar("Result")
Argument = TypeVar("Argument")
READ_AHEAD = 64  # items of a generator that wait for their reader
LAST_SECONDS = 2.0  # for what cancelled calls still send


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None  # that ended the generator; None: it has no more items


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that the reader makes between two items."""

    run: Callable[[], object]


def in_reader(function: Callable[[Argument], object]) -> Callable[[Argument], None]:
    """Return a function that a generator may call: its reader calls the original one, between two items.

    Outside of `iterate` it is called at once, in the thread of the loop.
    """

    def deliver(argument: Argument) -> None:
        pump = _present_pump.get()
        if pump is None:
            function(argument)
        else:
            pump.hand_over(_Call(partial(function, argument)))

    return deliver


class LoopThread:
    def __init__(self, name: str, *, ends_at_exit: bool = False) -> None:
        """`ends_at_exit`: close it when the program ends; else its owner does."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name=name, daemon=True)
        # Everything is started either before `_is_closed`, or not at all. The garbage collector may run in a thread
        # that holds it, and end a generator there.
        self._lock = threading.RLock()
        self._is_closed = False
        self._pid = os.getpid()
        self._pumps: weakref.WeakSet[_Pump[Any]] = weakref.WeakSet()
        self._thread.start()
        weakref.finalize(self, _end_abandoned, self._loop, self._pid).atexit = False
        if ends_at_exit:
            _ending_at_exit.add(self)

    @property
    def is_closed(self) -> bool:
        """Return whether nothing can be run any more. The child of a fork has no such thread."""
        return self._is_closed or os.getpid() != self._pid

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run the coroutine in the thread; return its result. An interrupt of the caller cancels it."""
        future = self._start(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise ClosedClientError("the client was closed before the call ended") from None
        except BaseException:
            future.cancel()
            raise

    def iterate(self, generator: AsyncGenerator[Result, None]) -> Generator[Result, None, None]:
        """Yield the items of an asynchronous generator, which is closed when the caller leaves."""
        pump = _Pump(generator, self._loop)
        with self._lock:
            self._pumps.add(pump)
        self._start(pump.run())
        try:
            yield from pump.items()
        finally:
            if threading.current_thread() is self._thread:  # closed by the garbage collector
                pump.cancel()
            elif not pump.has_ended:
                with suppress(ClosedClientError):  # the end of the thread has closed it
                    self.call(pump.close())

    def end_streams(self) -> None:
        """End the generators whose readers have not ended them: what they hold is freed while their client is open."""
        with self._lock:
            pumps = tuple(self._pumps)
        for pump in pumps:
            if not pump.has_ended:
                with suppress(ClosedClientError):
                    self.call(pump.close())

    def close(self) -> None:
        """End the thread, and everything that runs in it. In the child of a fork it does nothing."""
        if self.is_closed:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            others = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        others.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        problem = ""
        if os.getpid() != self._pid:
            coroutine.close()
            raise ClosedClientError(
                "the client was made in another process; make one in this process"
            )
        with self._lock:
            if self._is_closed:
                problem = "the client is closed; make a new one"
            elif threading.current_thread() is self._thread:
                problem = (
                    "a synchronous call would wait for itself here; use the asynchronous client"
                )
            else:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise ClosedClientError(problem)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, and free it. It knows no LoopThread, which may be collected meanwhile."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end_abandoned(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """End the loop of a LoopThread that was collected without a close. It waits for nothing: any thread may call it."""
    if os.getpid() == pid and not loop.is_closed():
        ending = asyncio.run_coroutine_threadsafe(_end_tasks(), loop)
        ending.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))


_ending_at_exit: weakref.WeakSet[LoopThread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Close what is open: later the threads stand still, and the end of an open stream would wait for ever."""
    for thread in tuple(_ending_at_exit):
        thread.close()


class _Pump(Generic[Result]):
    """Moves the items of a generator into the thread of their reader, at most READ_AHEAD of them ahead."""

    def __init__(
        self, generator: AsyncGenerator[Result, None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._generator = generator
        self._loop = loop
        self._room = asyncio.Semaphore(READ_AHEAD)
        self._items: queue.SimpleQueue[Result | _End | _Call] = queue.SimpleQueue()
        self._task: asyncio.Task[None] | None = None
        self.has_ended = False  # the reader has seen the end

    async def close(self) -> None:
        """End the generator. To be called behind `run`."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        """Let the generator end soon. To be called in the loop's thread."""
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        _present_pump.set(self)
        error: BaseException | None = None
        try:
            async with aclosing(self._generator) as items:
                async for item in items:
                    self.hand_over(item)
                    await self._room.acquire()
        except asyncio.CancelledError:
            error = ClosedClientError("the client was closed while its stream was read")
            raise
        except Exception as raised:
            error = raised
        finally:
            self.hand_over(_End(error))

    def hand_over(self, item: Result | _End | _Call) -> None:
        self._items.put(item)

    def items(self) -> Generator[Result, None, None]:
        """Yield the items in the reader's thread. Raise the error of the generator."""
        taken = 0
        while True:
            item = self._items.get()
            if isinstance(item, _End):
                self.has_ended = True
                if item.error is not None:
                    raise item.error
                return
            if isinstance(item, _Call):
                item.run()
                continue
            taken += 1
            if taken == READ_AHEAD // 2:
                with suppress(RuntimeError):  # the loop has ended: nothing waits for room
                    self._loop.call_soon_threadsafe(self._make_room, taken)
                taken = 0
            yield item

    def _make_room(self, count: int) -> None:
        for _ in range(count):
            self._room.release()


_present_pump: ContextVar[_Pump[Any] | None] = ContextVar("_present_pump", default=None)


async def _end_tasks() -> None:
    """Let all tasks end for LAST_SECONDS, such as those that close a session, and cancel the rest."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=LAST_SECONDS)
    await _cancel_others()


async def _cancel_others() -> None:
    """Cancel all tasks. Those that they begin at their end, such as the close of a session, have LAST_SECONDS."""
    for is_first in (True, False):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others and not is_first:
            await asyncio.wait(others, timeout=LAST_SECONDS)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
