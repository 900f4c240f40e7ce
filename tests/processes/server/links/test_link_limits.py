"""Limits of a link's listener for unknown clients: sizes, streams, handshakes, and the texts of a Hello."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from support.processes.link_peers import DEADLINE, hello, nodes, raw_peer

from modelswarm.protocol.link import grpc_stream
from modelswarm.protocol.link.handshake import MAX_HANDSHAKES, LinkAcceptor
from modelswarm.protocol.link.lane import LinkLimits
from modelswarm.protocol.messages import Close, Lane
from modelswarm.protocol.wire.frames import MAX_FRAME, pack

NEVER = 3600.0  # seconds; longer than any test
LIVE_LANE = "/modelswarm.link.v1.Link/Live"


async def test_large_message_is_refused_before_it_is_taken() -> None:
    async with nodes("a") as (a,), raw_peer(a, hello("large/1/x"), tuple(Lane)) as large:
        await a.received.until(lambda: len(a.received.up) == 1)
        await large.lanes[Lane.BULK].write(bytes(2 * MAX_FRAME))
        with pytest.raises(ConnectionError, match="larger than max"):
            async with asyncio.timeout(DEADLINE):
                await large.lanes[Lane.BULK].read()


async def test_lanes_of_one_connection_are_bounded() -> None:
    async with (
        nodes("a", limits=LinkLimits(handshake_seconds=NEVER)) as (a,),
        grpc.aio.insecure_channel(a.target) as channel,
    ):
        open_lane: Any = channel.stream_stream  # its type requires serializers; bytes need none
        opened = [open_lane(LIVE_LANE)() for _ in range(grpc_stream.MAX_STREAMS)]
        for call in opened:
            await call.wait_for_connection()
        refused = open_lane(LIVE_LANE)()
        answer = asyncio.ensure_future(ending_of(refused))
        done, _ = await asyncio.wait({answer}, timeout=0.2)
        assert not done, "it waits at its own end"
        opened[0].cancel()
        async with asyncio.timeout(DEADLINE):
            assert "not a Hello" in await answer


async def ending_of(call: Any) -> str:
    """Send an item other than a Hello; return the reason of the end."""
    try:
        await call.write(next(iter(pack([Close(1)]))))
        await call.read()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        assert call.done()
    return str(await call.details())


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


async def test_handshakes_at_a_time_are_bounded() -> None:
    acceptor = LinkAcceptor(NEVER)
    own = hello("a/1/x")
    waiting = [
        asyncio.ensure_future(acceptor.accept_lane(own, Lane.LIVE, SilentStream()))
        for _ in range(MAX_HANDSHAKES)
    ]
    await asyncio.sleep(0)
    with pytest.raises(grpc_stream.StreamBroken, match="handshakes are going on"):
        await acceptor.accept_lane(own, Lane.LIVE, SilentStream())
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    again = asyncio.ensure_future(acceptor.accept_lane(own, Lane.LIVE, SilentStream()))
    await asyncio.sleep(0)
    assert not again.done(), "there is a place again"
    for task in (*waiting, again):
        task.cancel()
    await asyncio.gather(*waiting, again, return_exceptions=True)


class SilentStream:
    """The lane of a client that sends nothing."""

    async def read(self) -> bytes:
        await asyncio.sleep(NEVER)
        return b""

    async def write(self, data: bytes) -> None:
        raise AssertionError("nothing is answered")
