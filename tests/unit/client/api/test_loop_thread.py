"""Synchronous callers of an event loop in another thread: items, errors, readers that leave, and the end."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest
from support.eventually import eventually
from support.processes.programs.held_gateway import held_gateway

from modelswarm.client.api import (
    Client,
    ClosedClientError,
    GatewayUnreachableError,
    LoopThread,
)
from modelswarm.client.api.loop_thread import READ_AHEAD


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread("test")
    yield made
    made.close()


class Source:
    """A generator that counts its items, and fails or waits for ever behind the last one if told so."""

    def __init__(self, items: int, end: Exception | None = None, waits: bool = False) -> None:
        self.items, self.end, self.waits = items, end, waits
        self.made = 0
        self.is_ended = False

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.items):
                self.made += 1
                yield number
            if self.end is not None:
                raise self.end
            if self.waits:
                await asyncio.Event().wait()
        finally:
            self.is_ended = True


def test_all_items_come_in_order(thread: LoopThread) -> None:
    assert list(thread.iterate(Source(1000).run())) == list(range(1000))


def test_error_comes_behind_the_items(thread: LoopThread) -> None:
    items = thread.iterate(Source(3, ValueError("bad")).run())
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="bad"):
        next(items)


def test_source_waits_for_its_reader(thread: LoopThread) -> None:
    source = Source(10 * READ_AHEAD)
    items = thread.iterate(source.run())
    assert next(items) == 0
    eventually("items are read ahead", lambda: source.made > READ_AHEAD // 2)
    thread.call(asyncio.sleep(0))
    assert source.made <= READ_AHEAD + 1
    items.close()
    assert source.is_ended and source.made <= READ_AHEAD + 1


def test_end_of_the_thread_ends_its_streams() -> None:
    thread = LoopThread("test")
    source = Source(1, waits=True)
    items = thread.iterate(source.run())
    assert next(items) == 0
    closing = threading.Thread(target=thread.close)
    closing.start()
    with pytest.raises(ClosedClientError):
        next(items)
    closing.join()
    assert source.is_ended and thread.is_closed
    with pytest.raises(ClosedClientError, match="closed"):
        next(thread.iterate(Source(1).run()))


def test_items_read_ahead_end_with_the_error_of_a_closed_client() -> None:
    thread = LoopThread("test")
    source = Source(10 * READ_AHEAD)
    items = thread.iterate(source.run())
    assert next(items) == 0
    eventually("items are read ahead", lambda: source.made > READ_AHEAD)
    thread.end_streams()
    thread.close()
    with pytest.raises(ClosedClientError):
        list(items)
    assert source.is_ended


def test_call_from_the_thread_itself_is_refused(thread: LoopThread) -> None:
    async def call_again() -> None:
        thread.call(asyncio.sleep(0))

    with pytest.raises(ClosedClientError, match="wait for itself"):
        thread.call(call_again())


def test_client_in_the_child_of_a_fork_is_refused() -> None:
    """The thread is not in the child, so that a call would wait for ever."""
    program = """
import os, signal
from modelswarm import Client
from modelswarm.client.api import ClosedClientError
with Client("http://127.0.0.1:9") as client:
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        raise SystemExit(code)
    signal.alarm(30)
    try:
        client.models()
    except ClosedClientError as error:
        print(error, flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    said = "the client was made in another process; make one in this process\n"
    assert (ended.returncode, ended.stdout) == (0, said), ended.stderr


def test_client_that_is_dropped_without_a_close_ends_its_thread() -> None:
    """A program that makes one for each request would have a thread and five open files more with each."""
    others = set(threading.enumerate())
    client = Client("http://127.0.0.1:9")
    [made] = set(threading.enumerate()) - others
    with pytest.raises(GatewayUnreachableError):
        client.models()
    assert made.is_alive()
    del client

    def has_ended() -> bool:
        gc.collect()  # the thread may hold the call's error until now, which refers to the client
        return not made.is_alive()

    eventually("the end of the thread", has_ended)


def test_session_of_a_stream_that_is_dropped_is_freed() -> None:
    with held_gateway() as gateway:
        gateway.say("two")
        stream = Client(gateway.url).stream_complete("one", model="m")
        assert next(stream).text == "two"
        del stream

        def is_closed() -> bool:
            gc.collect()  # as above
            return gateway.closed == [gateway.asked[0]["session_id"]]

        eventually("the session", is_closed)


def test_program_may_end_with_an_open_client() -> None:
    program = "from modelswarm import Client\nclient = Client('http://127.0.0.1:9')\n"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_stream_that_is_collected_in_the_thread_is_left(thread: LoopThread) -> None:
    """The garbage collector closes a generator in whichever thread it runs."""
    source = Source(1, waits=True)
    items = thread.iterate(source.run())
    assert next(items) == 0

    async def collect() -> None:
        items.close()

    thread.call(collect())
    eventually("the source is left", lambda: source.is_ended)


def test_stream_that_is_held_is_freed_with_its_client() -> None:
    """A name holds the iterator behind `break`. Its session would hold its KV for ten idle minutes."""
    with held_gateway() as gateway:
        gateway.say("two")
        with Client(gateway.url) as client:
            stream = client.stream_complete("one", model="m")
            assert next(stream).text == "two"
        assert gateway.closed == [gateway.asked[0]["session_id"]]
        with pytest.raises(ClosedClientError):
            next(stream)


def test_program_may_end_with_an_open_stream() -> None:
    """The thread stands still when the interpreter ends, so that the end of the stream would wait for ever."""
    program = """
import sys
from modelswarm import Client
stream = Client(sys.argv[1]).stream_complete("one", model="m")
print(next(stream).text, flush=True)
"""
    with held_gateway() as gateway:
        gateway.say("two")
        command = [sys.executable, "-c", program, gateway.url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "two\n", "")
    assert gateway.closed == [gateway.asked[0]["session_id"]]


def test_generator_may_be_collected_in_a_call() -> None:
    """The collector runs wherever objects are made, also where the thread's own lock is held."""
    thread = LoopThread("test")  # it can be closed only if the lock is free in the end
    source = Source(1, waits=True)
    items = thread.iterate(source.run())
    assert next(items) == 0

    def collect() -> None:
        with thread._lock:
            items.close()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(60)
    assert source.is_ended and not collecting.is_alive()
    thread.close()
