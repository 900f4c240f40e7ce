"""Limits of a link's listener for unknown clients: sizes, connections, handshakes, and the texts of a Hello."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from dataclasses import replace
from typing import Any

import pytest
from support.processes.link_peers import DEADLINE, hello, joined, nodes, raw_peer

from modelswarm.protocol.identity import Epoch
from modelswarm.protocol.link import listener
from modelswarm.protocol.link.handshake import MAX_HANDSHAKES, LinkAcceptor
from modelswarm.protocol.link.lane import LaneQueue, LinkLimits
from modelswarm.protocol.link.stream import CallStatus, MessageStream, StreamBroken
from modelswarm.protocol.messages import Input, Lane, LogChunk
from modelswarm.protocol.opaque import OPAQUE
from modelswarm.protocol.wire.frames import MAX_FRAME, pack

EPOCH = Epoch(1, 1)
NEVER = 3600.0  # seconds; longer than any test


async def test_large_message_is_refused_before_it_is_taken() -> None:
    async with nodes("a") as (a,), raw_peer(a, hello("large/1/x"), tuple(Lane)) as large:
        await a.received.until(lambda: len(a.received.up) == 1)
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(DEADLINE):
                await large.lanes[Lane.BULK].write(bytes(2 * MAX_FRAME))
                await large.lanes[Lane.BULK].read()
        await a.received.until(lambda: bool(a.received.down))
        assert f"a message of {2 * MAX_FRAME} bytes; at most" in a.received.down[0][1]


async def test_connections_that_say_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_OPENING", 4)
    monkeypatch.setattr(listener, "OPENING_SECONDS", NEVER)
    async with nodes("a") as (a,), contextlib.AsyncExitStack() as opened:

        async def connect() -> MessageStream:
            loop, port = asyncio.get_running_loop(), int(a.target.rpartition(":")[2])
            _, made = await loop.create_connection(MessageStream, "127.0.0.1", port)
            opened.callback(made.close)
            return made

        silent = [await connect() for _ in range(4)]
        await asyncio.sleep(0.1)
        with pytest.raises(ConnectionError, match="4 connections are being opened"):
            async with asyncio.timeout(DEADLINE):
                await (await connect()).read()
        silent[0].close()
        async with asyncio.timeout(DEADLINE):
            while not a.received.up:  # the listener may not have noticed yet
                with contextlib.suppress(ConnectionError, TimeoutError):
                    async with raw_peer(a, hello("b/1/x"), tuple(Lane)):
                        await a.received.until(lambda: bool(a.received.up), 1.0)


async def test_connection_that_says_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "OPENING_SECONDS", 0.2)
    async with nodes("a") as (a,):
        loop, port = asyncio.get_running_loop(), int(a.target.rpartition(":")[2])
        _, silent = await loop.create_connection(MessageStream, "127.0.0.1", port)
        with pytest.raises(ConnectionError, match="did not say what it is for"):
            async with asyncio.timeout(DEADLINE):
                await silent.read()


async def test_descriptors_that_are_used_up_flood_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with nodes("a", "b", limits=LinkLimits(connect_seconds=NEVER)) as (a, b):
        host, _, port = a.target.rpartition(":")
        waiting = [socket.create_connection((host, int(port))) for _ in range(40)]
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            await asyncio.sleep(0.1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        errors = [record for record in caplog.records if "out of system" in record.getMessage()]
        assert 0 < len(errors) <= 32
        await joined(b, a)  # it accepts again
        for each in waiting:
            each.close()


async def test_unknown_method_is_refused() -> None:
    async with nodes("a") as (a,), listener.open_call(a.target, "/no/Such") as call:
        with pytest.raises(StreamBroken, match="no such method") as refused:
            async with asyncio.timeout(DEADLINE):
                await call.read()
        assert refused.value.status == CallStatus.UNIMPLEMENTED


@pytest.mark.parametrize(
    "changes",
    [
        {"peer": "a\nforged line/1/x"},
        {"peer": "x" * 300 + "/1/x"},
        {"peer": "no-incarnation"},
        {"peer": ""},
        {"model": "a b"},
        {"model": "m" * 129},
        {"zone": "z" * 64},
        {"zone": "a\x1b[31m"},
        {"numerics": "n" * 257},
        {"numerics": "cpu avx2"},
        {"target": "host:1\nx"},
        {"revision": "r" * 257},
        {"dtype": "float32 "},
        {"replaces": ("gateway/1/x",) * 65},
        {"replaces": ("gateway",)},
    ],
    ids=lambda changes: "-".join(changes),
)
async def test_hello_with_a_forged_text_is_refused(changes: dict[str, Any]) -> None:
    async with nodes("a") as (a,):
        async with raw_peer(a, replace(hello("b/1/x"), **changes)) as forged:
            name = next(iter(changes))
            refused = f"a {name} that is not allowed|{name} is not a printable text"
            with pytest.raises(ConnectionError, match=refused):
                async with asyncio.timeout(DEADLINE):
                    await forged.greet(Lane.LIVE)
        assert not a.received.up


async def test_lane_lost_when_its_pair_is_complete_ends_the_other() -> None:
    acceptor, own, theirs = LinkAcceptor(NEVER), hello("a/1/x"), hello("b/1/x")
    async with contextlib.AsyncExitStack() as opened, asyncio.timeout(DEADLINE):

        async def stream_with_hello(lane: Lane) -> tuple[MessageStream, MessageStream]:
            loop, ends = asyncio.get_running_loop(), socket.socketpair()
            made = [(await loop.create_connection(MessageStream, sock=end))[1] for end in ends]
            for each in made:
                opened.callback(each.close)
            made[0].send_message(next(iter(pack([replace(theirs, lane=lane)]))))
            return made[0], made[1]

        dialler, live = await stream_with_hello(Lane.LIVE)
        first = asyncio.ensure_future(acceptor.accept_lane(own, Lane.LIVE, live))
        await dialler.read()  # it waits for the other lane
        _, bulk = await stream_with_hello(Lane.BULK)
        pair = await acceptor.accept_lane(own, Lane.BULK, bulk)
        first.cancel()
        await pair.ended.wait()


async def test_handshakes_at_a_time_are_bounded() -> None:
    acceptor = LinkAcceptor(NEVER)
    own = hello("a/1/x")
    waiting = [
        asyncio.ensure_future(acceptor.accept_lane(own, Lane.LIVE, MessageStream()))
        for _ in range(MAX_HANDSHAKES)
    ]
    await asyncio.sleep(0)
    with pytest.raises(StreamBroken, match="handshakes are going on"):
        await acceptor.accept_lane(own, Lane.LIVE, MessageStream())
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    again = asyncio.ensure_future(acceptor.accept_lane(own, Lane.LIVE, MessageStream()))
    await asyncio.sleep(0)
    assert not again.done(), "there is a place again"
    for task in (*waiting, again):
        task.cancel()
    await asyncio.gather(*waiting, again, return_exceptions=True)


def test_rows_count_in_the_queue_of_a_lane() -> None:
    queue = LaneQueue(1 << 30)
    queue.put(Input(1, EPOCH, 0, (OPAQUE,), bytes(5000)))
    queue.put(LogChunk("s", EPOCH, 0, 1, (OPAQUE,), None, bytes(3000)))
    assert 8000 < queue.queued_bytes < 9000
