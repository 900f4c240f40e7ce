"""Links over real sockets, in one loop and between processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.processes.link_peers import (
    DEADLINE,
    Node,
    echo_process,
    hello,
    joined,
    nodes,
    raw_peer,
)

from modelswarm.protocol.identity import MAX_NUMBER, Address, Epoch
from modelswarm.protocol.link import stream
from modelswarm.protocol.link.lane import LinkLimits
from modelswarm.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    Input,
    Item,
    Lane,
    Rows,
    Token,
    Window,
)
from modelswarm.protocol.wire.frames import MAX_FRAME, pack

EPOCH = Epoch(1, 1)
NEVER = 3600.0  # seconds; longer than any test
BOTH = (Lane.LIVE, Lane.BULK)


def rows(position: int, size: int = 4096) -> Rows:
    return Rows(1, EPOCH, position, 1, bytes([position % 251]) * size)


def positions(items: Sequence[Item], kind: type[Rows | Token]) -> list[int]:
    return [
        item.first if isinstance(item, Rows) else item.position
        for item in items
        if isinstance(item, Rows | Token) and isinstance(item, kind)
    ]


async def test_both_ends_receive_hello() -> None:
    async with nodes("a", "b") as (a, b):
        await joined(a, b)
        assert [(h.peer, h.target) for h in a.received.up] == [(b.peer, b.target)]
        assert [(h.peer, h.target) for h in b.received.up] == [(a.peer, a.target)]


async def test_each_lane_keeps_its_order_in_both_directions() -> None:
    async with nodes("a", "b") as (a, b):
        await joined(a, b)
        for i in range(500):
            a.send(b.address, [Token(1, EPOCH, i, i), Close(i + 1)])
            a.send(b.address, [rows(i, 40_000)], Lane.BULK)
            b.send(Address(a.peer, ""), [Token(1, EPOCH, i, i)])
            if i % 50 == 0:
                await asyncio.sleep(0)
        await b.received.until(lambda: len(b.received.items) == 1500)
        await a.received.until(lambda: len(a.received.items) == 500)
        expected = list(range(500))
        assert positions(b.received.items, Token) == expected
        assert positions(b.received.items, Rows) == expected
        assert positions(a.received.items, Token) == expected
        assert [i.handle for i in b.received.items if isinstance(i, Close)] == [
            e + 1 for e in expected
        ]


async def test_items_sent_together_arrive_together() -> None:
    async with nodes("a", "b") as (a, b):
        await joined(a, b)
        a.send(b.address, [Close(1), *(Token(i, EPOCH, 1, 1) for i in range(64)), rows(1)])
        await b.received.until(lambda: len(b.received.items) == 66)
        assert b.received.calls == 1


async def test_payloads_arrive_as_they_were_sent() -> None:
    async with nodes("a", "b") as (a, b):
        await joined(a, b)
        payload = os.urandom(3_000_000)
        a.send(b.address, [Rows(1, EPOCH, 0, 750, payload, sample=True)], Lane.BULK)
        await b.received.until(lambda: sum(positions_count(b)) == 750)
        parts = [item for item in b.received.items if isinstance(item, Rows)]
        assert b"".join(part.payload for part in parts) == payload
        assert parts[-1].sample


def positions_count(node: Node) -> list[int]:
    return [item.count for item in node.received.items if isinstance(item, Rows)]


async def test_sending_to_an_address_dials_it() -> None:
    async with nodes("a", "b") as (a, b):
        a.send(b.address, [Token(1, EPOCH, i, i) for i in range(10)])
        a.send(b.address, [rows(0)], Lane.BULK)
        await b.received.until(lambda: len(b.received.items) == 11)
        assert positions(b.received.items, Token) == list(range(10))
        assert len(a.received.up) == 1


async def test_message_that_cannot_be_encoded_ends_no_link(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with nodes("a", "b") as (a, b):
        await joined(a, b)
        a.send(b.address, [Close(1), Window(7, Epoch(1 << 64, 1), 1, 1), Close(2)])
        a.send(b.address, [Token(8, Epoch(1 << 64, 1), 1, 1), Close(3)])
        await b.received.until(lambda: len(b.received.items) == 3)
        assert b.received.items == [Close(1), Close(2), Close(3)]
        assert (a.received.down, b.received.down) == ([], [])
    dropped = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(dropped) == 2
    assert dropped[0].startswith(
        f"a message to {b.peer} cannot be encoded and is dropped: Window, handle 0x7"
    )


async def test_epoch_above_the_maximum_is_refused_when_read() -> None:
    async with nodes("a", "b") as (a, b):
        await joined(a, b)
        a.send(b.address, [Window(7, Epoch(MAX_NUMBER + 1, 1), 1, 1)])
        await b.received.until(lambda: bool(b.received.down))
        assert b.received.items == []
        assert "above" in b.received.down[0][1]


async def test_lease_above_a_day_is_refused_by_both_ends() -> None:
    day, more = 86_400_000, 86_400_001
    async with nodes("b", limits=LinkLimits(connect_seconds=NEVER)) as (b,):
        async with raw_peer(b, replace(hello("a/1/x"), lease_ms=day)) as within:
            await within.greet(Lane.LIVE)
        async with raw_peer(b, replace(hello("c/1/x"), lease_ms=more)) as beyond:
            with pytest.raises(stream.StreamBroken, match="states a lease of 86400001 ms"):
                await beyond.greet(Lane.LIVE)
        other = Node(replace(hello("d/1/x"), lease_ms=more))
        await other.listen()
        b.links.dial(other.address)
        await b.received.until(lambda: bool(b.received.down))
        assert "86400001 ms" in b.received.down[0][1]
        await other.links.close()


async def test_two_ends_that_dial_each_other_are_one_peer() -> None:
    async with nodes("a", "b") as (a, b):
        a.links.dial(b.address)
        b.links.dial(a.address)
        for i in range(200):
            a.send(b.address, [Token(1, EPOCH, i, i)])
            b.send(a.address, [Token(1, EPOCH, i, i)])
            await asyncio.sleep(0.0005)
        await a.received.until(lambda: len(a.received.items) == 200)
        await b.received.until(lambda: len(b.received.items) == 200)
        for node in (a, b):
            assert positions(node.received.items, Token) == list(range(200))
            assert len(node.received.up) == 1
            assert not node.received.down
        a.links.unlink(b.peer, "enough")
        for node in (a, b):
            await node.received.until(lambda node=node: bool(node.received.down))  # type: ignore[misc]
        await asyncio.sleep(0.1)
        assert (len(a.received.down), len(b.received.down)) == (1, 1)


async def test_refused_connection_is_reported_before_its_timeout() -> None:
    async with nodes("a", limits=LinkLimits(connect_seconds=NEVER)) as (a,):
        a.links.dial(Address("absent", "127.0.0.1:1"))
        await a.received.until(lambda: bool(a.received.down))
        assert a.received.down[0] == ("absent", "Connection refused")
        a.links.dial(Address("absent", "localhost:1"))  # two addresses
        await a.received.until(lambda: len(a.received.down) == 2)
        assert a.received.down[1] == ("absent", "Connection refused")


async def test_peer_that_never_answers_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with nodes("a", limits=LinkLimits(connect_seconds=0.3)) as (a,):
            a.links.dial(Address("silent", f"127.0.0.1:{silent.getsockname()[1]}"))
            await a.received.until(lambda: bool(a.received.down))
            assert "did not answer" in a.received.down[0][1]


async def test_other_process_at_the_address_is_refused() -> None:
    async with nodes("a", "b") as (a, b):
        a.links.dial(Address("b/1/before-its-restart", b.target))
        await a.received.until(lambda: bool(a.received.down))
        peer, reason = a.received.down[0]
        assert peer == "b/1/before-its-restart"
        assert "other identity" in reason
        assert not a.received.up
        await joined(a, b)


async def test_dialling_another_identity_keeps_the_existing_link() -> None:
    """An address now belongs to another pod: a dial for the old one must not end the link to the new one."""
    async with nodes("a", "b") as (a, b):
        await joined(a, b)
        for wrong in ("b/1/before-its-restart", "gone/1"):
            a.links.dial(Address(wrong, b.target))
        await a.received.until(lambda: len(a.received.down) == 2)
        a.send(b.address, [Close(1)])
        await b.received.until(lambda: bool(b.received.items))
        assert len(a.received.up) == len(b.received.up) == 1
        assert not b.received.down


async def test_pod_is_dialled_without_its_nonce() -> None:
    async with nodes("a", "b") as (a, b):
        a.links.dial(Address("b/1", b.target))
        await a.received.until(lambda: bool(a.received.up))
        assert a.received.up[0].peer == b.peer == "b/1/x"
        a.links.dial(Address("b/1", b.target))  # already linked: no effect
        a.send(Address(b.peer, ""), [Close(1)])
        await b.received.until(lambda: bool(b.received.items))
        assert len(a.received.up) == len(b.received.up) == 1
        await b.links.close()
        await a.received.until(lambda: bool(a.received.down))
        assert a.received.down[0][0] == "b/1/x"
        a.links.dial(Address("b/1", b.target))
        await a.received.until(lambda: len(a.received.down) == 2)
        assert a.received.down[1][0] == "b/1", "as it was dialled"


@pytest.mark.parametrize("wanted", ["b", "b/2", "b/", "b/1/", "/1", "c/1", ""])
async def test_pod_of_other_name_or_incarnation_is_refused(wanted: str) -> None:
    async with nodes("a", "b") as (a, b):
        a.links.dial(Address(wanted, b.target))
        await a.received.until(lambda: bool(a.received.down))
        assert a.received.down[0][0] == wanted
        assert "other identity" in a.received.down[0][1]
        assert not a.received.up


async def test_container_restarted_in_its_pod_is_a_new_peer() -> None:
    async with nodes("a") as (a,):
        first, second = Node(hello("p/3/first")), Node(hello("p/3/second"))
        target = await first.links.listen("127.0.0.1:0")
        a.links.dial(Address("p/3", target))
        await a.received.until(lambda: bool(a.received.up))
        await first.links.close()
        await a.received.until(lambda: bool(a.received.down))
        try:
            assert await second.links.listen(target) == target
            a.links.dial(Address("p/3", target))
            await a.received.until(lambda: len(a.received.up) == 2)
            assert [each.peer for each in a.received.up] == ["p/3/first", "p/3/second"]
        finally:
            await second.links.close()


@pytest.mark.parametrize(
    "version",
    [(PROTOCOL_VERSION[0] + 1, 0), (1, 0), (PROTOCOL_VERSION[0], PROTOCOL_VERSION[1] + 2)],
)
async def test_other_protocol_version_is_refused_naming_both(
    version: tuple[int, int],
) -> None:
    async with nodes("a") as (a,):
        other = Node(hello("other/1/x", version))
        try:
            other.links.dial(a.address)
            await other.received.until(lambda: bool(other.received.down))
        finally:
            await other.links.close()
        reason = other.received.down[0][1]
        assert f"{version[0]}.{version[1]}" in reason
        assert f"{PROTOCOL_VERSION[0]}.{PROTOCOL_VERSION[1]}" in reason
        assert not a.received.up


async def test_one_minor_version_apart_works() -> None:
    async with nodes("a") as (a,):
        newer = Node(hello("newer/1/x", (PROTOCOL_VERSION[0], PROTOCOL_VERSION[1] + 1)))
        try:
            await joined(newer, a)
        finally:
            await newer.links.close()


GARBAGE = {
    "random": os.urandom(300),
    "empty": b"",
    "oversized": bytes(MAX_FRAME + 8),
    "beyond a message": bytes(stream.MAX_MESSAGE + 8),
    "a frame cut short": next(iter(pack([rows(1)])))[:-8],
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("lane", Lane)
async def test_a_bad_frame_closes_that_link_only(
    lane: Lane, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with nodes("a", "b") as (a, b):
        b.echo()
        await joined(a, b)
        async with raw_peer(b, hello("bad/1/x"), BOTH) as bad:
            await b.received.until(lambda: len(b.received.up) == 2)
            with contextlib.suppress(ConnectionError):  # it may end before it has taken all
                await bad.lanes[lane].write(data)
            await b.received.until(lambda: bool(b.received.down))
            assert [peer for peer, _ in b.received.down] == ["bad/1/x"]
            with pytest.raises(ConnectionError):
                async with asyncio.timeout(DEADLINE):
                    await bad.lanes[Lane.LIVE if lane is Lane.BULK else Lane.BULK].read()
        a.send(b.address, [Token(1, EPOCH, 1, 1)])
        await a.received.until(lambda: len(a.received.items) == 1)
        assert (len(a.received.down), len(b.received.down)) == (0, 1)
    records = [record for record in caplog.records if "bad/1/x" in record.getMessage()]
    assert len(records) == 1
    assert not any(record.exc_info for record in caplog.records)


async def test_stream_without_hello_is_refused() -> None:
    async with nodes("a") as (a,):
        async with raw_peer(a, hello("rude/1/x")) as rude:
            await rude.lanes[Lane.LIVE].write(next(iter(pack([Close(1)]))))
            with pytest.raises(ConnectionError, match="not a Hello"):
                async with asyncio.timeout(DEADLINE):
                    await rude.lanes[Lane.LIVE].read()
        assert not a.received.up


async def test_half_a_link_is_given_up() -> None:
    async with nodes("a", limits=LinkLimits(handshake_seconds=2.0)) as (a,):
        async with raw_peer(a, hello("half/1/x"), [Lane.LIVE]) as half:
            with pytest.raises(ConnectionError, match="in time"):
                async with asyncio.timeout(DEADLINE):
                    await half.lanes[Lane.LIVE].read()
        assert not a.received.up


async def test_losing_one_lane_closes_both() -> None:
    async with nodes("a") as (a,), raw_peer(a, hello("torn/1/x"), BOTH) as torn:
        await a.received.until(lambda: bool(a.received.up))
        torn.lanes[Lane.BULK].close()
        await a.received.until(lambda: bool(a.received.down))
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(DEADLINE):
                await torn.lanes[Lane.LIVE].read()
        assert len(a.received.down) == 1


async def test_reconnecting_peer_replaces_its_old_link() -> None:
    async with nodes("a") as (a,), raw_peer(a, hello("again/1/x"), BOTH):
        await a.received.until(lambda: len(a.received.up) == 1)
        async with raw_peer(a, hello("again/1/x"), BOTH) as second:
            await a.received.until(lambda: len(a.received.up) == 2)
            assert len(a.received.down) == 1
            a.send(Address("again/1/x", ""), [Close(7)])
            async with asyncio.timeout(DEADLINE):
                assert await second.lanes[Lane.LIVE].read() == next(iter(pack([Close(7)])))


async def test_acceptor_that_hangs_up_is_a_failed_dial() -> None:
    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with nodes("a", limits=LinkLimits(connect_seconds=NEVER)) as (a,):
            for _ in range(2):
                a.received.down.clear()
                a.links.dial(Address("c/1/x", target))
                await a.received.until(lambda: bool(a.received.down))
    finally:
        server.close()


async def test_full_bulk_lane_does_not_block_the_live_lane() -> None:
    async with nodes("a") as (a,), raw_peer(a, hello("slow/1/x"), BOTH) as slow:
        await a.received.until(lambda: bool(a.received.up))
        a.send(Address("slow/1/x", ""), [rows(i, 1 << 20) for i in range(32)], Lane.BULK)
        await asyncio.sleep(0.2)
        assert a.links.queued_bytes("slow/1/x", Lane.BULK) > 20 << 20  # the peer does not read it
        for _ in range(50):
            a.send(Address("slow/1/x", ""), [Close(1)])
            async with asyncio.timeout(DEADLINE):
                await slow.lanes[Lane.LIVE].read()
        assert a.links.queued_bytes("slow/1/x", Lane.BULK) > 20 << 20
        assert not a.received.down


async def test_link_with_too_much_queued_is_closed() -> None:
    async with nodes("a", limits=LinkLimits(queued_bytes=8 << 20)) as (a,):
        async with raw_peer(a, hello("slow/1/x"), BOTH):
            await a.received.until(lambda: bool(a.received.up))
            a.send(Address("slow/1/x", ""), [rows(i, 1 << 20) for i in range(9)], Lane.BULK)
            assert not a.received.down  # not called back within send
            await a.received.until(lambda: bool(a.received.down))
        assert "too much is queued" in a.received.down[0][1]


async def test_link_that_takes_nothing_for_long_is_closed() -> None:
    async with nodes("a", limits=LinkLimits(stalled_seconds=0.4)) as (a,):
        async with raw_peer(a, hello("slow/1/x"), BOTH):
            await a.received.until(lambda: bool(a.received.up))
            a.send(Address("slow/1/x", ""), [rows(i, 1 << 20) for i in range(32)], Lane.BULK)
            await a.received.until(lambda: bool(a.received.down))
        assert "does not read" in a.received.down[0][1]


@pytest.fixture
def without_keepalives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn keepalives off, so that no missing one reveals a lost peer."""
    monkeypatch.setattr(stream, "KEEPALIVE_SECONDS", NEVER)


@pytest.mark.usefixtures("without_keepalives")
async def test_dialler_notices_a_killed_peer_without_keepalives() -> None:
    async with nodes("a") as (a,), echo_process() as (echo, pid):
        a.links.dial(echo)
        await a.received.until(lambda: bool(a.received.up))
        a.send(echo, [Close(5)])
        await a.received.until(lambda: a.received.items == [Close(5)])
        os.kill(pid, signal.SIGKILL)
        await a.received.until(lambda: bool(a.received.down))


@pytest.mark.usefixtures("without_keepalives")
async def test_acceptor_notices_a_killed_peer_without_keepalives() -> None:
    async with nodes("a") as (a,), echo_process(dials=a) as (echo, pid):
        await a.received.until(lambda: bool(a.received.up))
        a.send(echo, [Input(1, EPOCH, 0, (1, 2, 3))])
        await a.received.until(lambda: bool(a.received.items))
        os.kill(pid, signal.SIGKILL)
        await a.received.until(lambda: bool(a.received.down))


async def test_close_calls_only_the_peers_handler() -> None:
    async with nodes("a", "b") as (a, b):
        await joined(a, b)
        await a.links.close()
        await b.received.until(lambda: bool(b.received.down))
        assert not a.received.down
        a.links.dial(b.address)
        a.send(b.address, [Close(1)])
        await asyncio.sleep(0.1)
        assert len(b.received.up) == 1


async def test_items_sent_before_close_still_arrive() -> None:
    async with nodes("a", "b", limits=LinkLimits(close_seconds=NEVER)) as (a, b):
        await joined(a, b)
        a.send(b.address, [Close(1), *(rows(i, 1 << 18) for i in range(20)), Close(2)])
        await a.links.close()
        await b.received.until(lambda: bool(b.received.down))
        assert b.received.items[0] == Close(1)
        assert b.received.items[-1] == Close(2)
        assert len(b.received.items) == 22


async def test_items_sent_while_links_close_break_no_lane(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with nodes("a", "b", limits=LinkLimits(close_seconds=NEVER)) as (a, b):
        await joined(a, b)
        a.send(b.address, [Close(1), *(rows(i, 1 << 18) for i in range(20)), Close(2)])
        closing = asyncio.ensure_future(a.links.close())
        while not closing.done():  # a step may end, and a heartbeat be due
            await asyncio.sleep(0)
            a.send(b.address, [Close(3)])
        await closing
        await b.received.until(lambda: bool(b.received.down))
        assert b.received.items[-1] == Close(2)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_close_ends_although_a_peer_does_not_read() -> None:
    async with nodes("a") as (a,), raw_peer(a, hello("slow/1/x"), BOTH):
        await a.received.until(lambda: bool(a.received.up))
        a.send(Address("slow/1/x", ""), [rows(i, 1 << 20) for i in range(32)], Lane.BULK)
        async with asyncio.timeout(DEADLINE):
            await a.links.close()


async def test_a_port_in_use_is_an_error() -> None:
    async with nodes("a", "b") as (a, b):
        with pytest.raises(OSError, match="in use"):
            await b.links.listen(a.target)
