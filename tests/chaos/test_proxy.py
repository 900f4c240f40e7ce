"""The proxy between two real links: what it does to one direction, and that it does nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator

import pytest
from support.chaos.link_frames import FrameCutter, message_of
from support.chaos.proxy import LinkFaults, Network
from support.processes.link_peers import Node, nodes

from modelswarm.protocol.identity import Address, Epoch
from modelswarm.protocol.link.lane import LinkLimits
from modelswarm.protocol.messages import Input, Lane, Token

EPOCH = Epoch(1, 1)


@contextlib.asynccontextmanager
async def through_a_proxy() -> AsyncIterator[tuple[Network, Node, Node, Address]]:
    """a has dialled b through a proxy; both speak once."""
    network = Network(seed=1)
    try:
        async with nodes("a", "b") as (a, b):
            port = int(b.target.rpartition(":")[2])
            way = Address(b.peer, await asyncio.to_thread(network.proxy, "b", port))
            a.links.dial(way)
            await a.received.until(lambda: bool(a.received.up))
            await b.received.until(lambda: bool(b.received.up))
            yield network, a, b, way
    finally:
        await asyncio.to_thread(network.close)


def tokens(node: Node) -> list[int]:
    return [item.position for item in node.received.items if isinstance(item, Token)]


def say(source: Node, to: Node, position: int) -> None:
    source.send(Address(to.peer, ""), [Token(1, EPOCH, position, 5)])


async def test_both_directions_and_both_lanes_pass() -> None:
    async with through_a_proxy() as (_, a, b, way):
        say(a, b, 1)
        say(b, a, 2)
        a.send(way, [Input(1, EPOCH, 0, tuple(range(50_000)))], Lane.BULK)
        await b.received.until(lambda: len(b.received.items) >= 5)
        await a.received.until(lambda: bool(a.received.items))
        assert (tokens(a), tokens(b)) == ([2], [1])
        inputs = [item for item in b.received.items if isinstance(item, Input)]
        assert sum(len(part.tokens) for part in inputs) == 50_000


async def test_one_direction_is_blocked_and_the_other_is_not() -> None:
    async with through_a_proxy() as (network, a, b, _):
        end = network.disturb(LinkFaults("a", "b", blocked=True, cause="cut"))
        say(a, b, 1)
        say(b, a, 2)
        await a.received.until(lambda: tokens(a) == [2])
        await asyncio.sleep(0.1)
        assert tokens(b) == []
        assert network.affected["cut"] >= 1
        end()
        await b.received.until(lambda: tokens(b) == [1])
        assert not a.received.down
        assert not b.received.down


async def test_delayed_items_keep_their_order() -> None:
    async with through_a_proxy() as (network, a, b, _):
        network.disturb(LinkFaults("b", "a", delay=0.3, cause="delay"))
        for position in range(20):
            say(b, a, position)
        await a.received.until(lambda: len(tokens(a)) == 20)
        assert network.affected["delay"] >= 1
        assert tokens(a) == list(range(20))


@pytest.mark.full
async def test_delayed_item_comes_late() -> None:
    async with through_a_proxy() as (network, a, b, _):
        network.disturb(LinkFaults("b", "a", delay=0.3))
        began = time.monotonic()
        say(b, a, 1)
        await a.received.until(lambda: tokens(a) == [1])
        assert time.monotonic() - began >= 0.3


async def test_doubled_frame_brings_its_items_twice() -> None:
    async with through_a_proxy() as (network, a, b, _):
        network.disturb(LinkFaults("b", "a", doubled=1.0))
        for position in range(5):
            say(b, a, position)
            await a.received.until(lambda p=position: tokens(a)[-2:] == [p, p])  # type: ignore[misc]
        assert not a.received.down
        assert network.doubled >= 5


async def test_truncated_frame_ends_the_link_at_both_ends() -> None:
    async with through_a_proxy() as (network, a, b, _):
        network.truncate("a", "b")
        say(a, b, 1)
        await a.received.until(lambda: bool(a.received.down))
        await b.received.until(lambda: bool(b.received.down))
        assert tokens(b) == []
        assert network.truncated >= 1, "of either lane"


async def test_dial_through_a_cut_is_not_linked() -> None:
    network, limits = Network(seed=1), LinkLimits(connect_seconds=3.0)
    try:
        async with nodes("a", "b", limits=limits) as (a, b):
            port = int(b.target.rpartition(":")[2])
            way = Address(b.peer, await asyncio.to_thread(network.proxy, "b", port))
            end = network.disturb(
                LinkFaults("a", "b", blocked=True), LinkFaults("b", "a", blocked=True)
            )
            a.links.dial(way)
            await a.received.until(lambda: bool(a.received.down))
            end()
            a.links.dial(way)
            await a.received.until(lambda: bool(a.received.up))
    finally:
        await asyncio.to_thread(network.close)


def frame(kind: int, body: bytes) -> bytes:
    return struct.pack("<BxxxI", kind, len(body)) + body


@pytest.mark.parametrize("step", (1, 7, 1000))
def test_bytes_become_frames_in_any_chunks(step: int) -> None:
    frames = [frame(0, b"name"), frame(1, b""), frame(0, b"m" * 300), frame(0, b""), frame(2, b"")]
    cutter, found = FrameCutter(), list[bytes]()
    stream = b"".join(frames)
    for at in range(0, len(stream), step):
        found += cutter.feed(stream[at : at + step])
    assert found == frames


def test_only_messages_have_a_body() -> None:
    assert message_of(frame(0, b"hello")) == b"hello"
    assert [message_of(frame(kind, b"")) for kind in (1, 2, 3)] == [None] * 3
