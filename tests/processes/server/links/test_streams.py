"""Message streams over real sockets: framing, flow control, keepalives, and ends with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from support.processes.link_peers import DEADLINE

from modelswarm.protocol.link import stream
from modelswarm.protocol.link.stream import CallRefused, CallStatus, MessageStream, StreamBroken
from modelswarm.protocol.wire.frames import MAX_FRAME

MESSAGE, KEEPALIVE, END = 0, 1, 2
NEVER = 3600.0  # seconds; longer than any test


def header(kind: int, length: int) -> bytes:
    return struct.pack("<BxxxI", kind, length)


def message(body: bytes) -> bytes:
    return header(MESSAGE, len(body)) + body


@contextlib.asynccontextmanager
async def raw_pair() -> AsyncIterator[tuple[MessageStream, socket.socket]]:
    """Yield a stream, and the other end of its connection as a socket."""
    near, far = socket.socketpair()
    far.setblocking(False)
    loop = asyncio.get_running_loop()
    _, made = await loop.create_connection(MessageStream, sock=near)
    try:
        async with asyncio.timeout(DEADLINE):
            yield made, far
    finally:
        made.close()
        far.close()


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[MessageStream, MessageStream]]:
    one, other = socket.socketpair()
    loop = asyncio.get_running_loop()
    made = [(await loop.create_connection(MessageStream, sock=end))[1] for end in (one, other)]
    try:
        async with asyncio.timeout(DEADLINE):
            yield made[0], made[1]
    finally:
        for each in made:
            each.close()


@pytest.mark.parametrize("step", [1, 3, 7, 8, 9, 1000, 1 << 20])
async def test_messages_arrive_whole_however_the_bytes_are_cut(step: int) -> None:
    bodies = [b"", b"a", bytes(range(256)), b"x" * 20_000, b"y" * 16_376, b"z" * 16_377, b"end"]
    sent = b"".join(map(message, bodies))
    async with raw_pair() as (near, far):
        loop = asyncio.get_running_loop()

        async def write() -> None:
            for at in range(0, len(sent), step):
                await loop.sock_sendall(far, sent[at : at + step])
                if step < len(sent):
                    await asyncio.sleep(0)

        writing = asyncio.ensure_future(write())
        assert [bytes(await near.read()) for _ in bodies] == bodies
        await writing


@pytest.mark.parametrize(
    "size",
    [
        65_535,
        65_536,
        65_537,
        262_144,
        262_145,
        1 << 20,
        (1 << 20) + 1,
        MAX_FRAME,
        stream.MAX_MESSAGE,
    ],
)
async def test_long_messages_arrive_whole_and_one_by_one(size: int) -> None:
    bodies = [os.urandom(size), b"between", os.urandom(size)]
    async with raw_pair() as (near, far):
        sending = asyncio.ensure_future(
            asyncio.get_running_loop().sock_sendall(far, b"".join(map(message, bodies)))
        )
        for body in bodies:
            assert bytes(await near.read()) == body
        await sending


async def test_message_takes_little_memory_before_it_comes() -> None:
    """A stranger may say a length and send nothing, on a thousand connections."""
    async with raw_pair() as (near, far):
        far.send(message(b"good") + header(MESSAGE, stream.MAX_MESSAGE))
        assert bytes(await near.read()) == b"good"
        with near.get_buffer(-1) as room:
            assert len(room) <= 64 << 10


async def test_messages_without_a_body_fill_no_memory() -> None:
    async with raw_pair() as (near, far):
        sent = header(MESSAGE, 0) * (1 << 18)
        sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(far, sent))
        await asyncio.wait({sending}, timeout=2.0)
        assert not sending.done(), "the socket is not read: enough wait for the reader"
        for _ in range(1 << 18):
            assert bytes(await near.read()) == b""
        await sending


async def test_messages_go_both_ways_in_order() -> None:
    async with pair() as (one, other):
        for number in range(300):
            one.send_message(b"%d" % number * (number + 1))
            other.send_message(b"%d" % number)
        for number in range(300):
            assert bytes(await other.read()) == b"%d" % number * (number + 1)
            assert bytes(await one.read()) == b"%d" % number


async def test_messages_before_and_after_delivery_begins_come_in_order() -> None:
    async with pair() as (one, other):
        one.send_message(b"0")
        assert bytes(await other.read()) == b"0"
        for number in range(1, 4):
            one.send_message(b"%d" % number)
        await asyncio.sleep(0.05)
        received: list[bytes] = []
        done = asyncio.Event()

        def receive(data: bytes) -> None:
            received.append(bytes(data))
            if data == b"6":
                done.set()

        delivering = asyncio.ensure_future(other.deliver_to(receive, lambda: None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for number in range(4, 7):
            one.send_message(b"%d" % number)
        await done.wait()
        assert received == [b"%d" % number for number in range(1, 7)]
        one.close()
        with pytest.raises(StreamBroken):
            await delivering


async def test_receiver_that_lets_an_iterator_end_ends_the_stream() -> None:
    async with pair() as (one, other):
        delivering = asyncio.ensure_future(other.deliver_to(lambda _: next(iter(())), lambda: None))
        await asyncio.sleep(0)
        one.send_message(b"first")
        with pytest.raises(RuntimeError, match="StopIteration"):
            await delivering


async def test_error_of_the_receiver_ends_the_stream_with_it() -> None:
    async with pair() as (one, other):

        def receive(_: object) -> None:
            raise LookupError("a bug")

        delivering = asyncio.ensure_future(other.deliver_to(receive, lambda: None))
        await asyncio.sleep(0)
        one.send_message(b"first")
        one.send_message(b"second")
        with pytest.raises(LookupError, match="a bug"):
            await delivering
        with pytest.raises(StreamBroken):
            await one.read()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (header(MESSAGE, stream.MAX_MESSAGE + 1), f"at most {stream.MAX_MESSAGE}"),
        (header(MESSAGE, (1 << 32) - 1), f"at most {stream.MAX_MESSAGE}"),
        (header(3, 0), "no message of a link"),
        (header(KEEPALIVE, 1) + b"x", "no message of a link"),
        (header(END, 1 << 20), "no message of a link"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "no message of a link"),
        (b"GET / HTTP/1.1\r\n\r\n", "no message of a link"),
    ],
    ids=["long", "longest", "kind", "keepalive with a body", "long end", "http2", "http1"],
)
async def test_header_that_is_none_ends_the_stream(sent: bytes, reason: str) -> None:
    async with raw_pair() as (near, far):
        await asyncio.get_running_loop().sock_sendall(far, message(b"good") + sent)
        assert bytes(await near.read()) == b"good"
        with pytest.raises(StreamBroken, match=reason):
            await near.read()
        with pytest.raises(StreamBroken, match=reason):
            near.send_message(b"more")


async def test_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEPALIVE_SECONDS", 0.05)
    async with raw_pair() as (near, far):
        with pytest.raises(StreamBroken, match="nothing came from the peer"):
            await near.read()
        assert far.recv(100).startswith(header(KEEPALIVE, 0) * 3)


async def test_keepalives_keep_a_stream_that_takes_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow network, megabytes are under way in front of anything that is sent now."""
    monkeypatch.setattr(stream, "KEEPALIVE_SECONDS", 0.02)
    async with raw_pair() as (near, far):
        while near.paused_since is None:
            near.send_message(bytes(1 << 20))
        waiting = near.buffered_bytes
        for _ in range(20):
            far.send(header(KEEPALIVE, 0))
            await asyncio.sleep(0.02)
        assert near.buffered_bytes == waiting, "no keepalives pile up behind the data"
        near.send_message(b"still open")


async def test_slow_reader_does_not_give_up_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keepalives of the peer wait in the socket, which is not read."""
    monkeypatch.setattr(stream, "KEEPALIVE_SECONDS", 0.02)
    async with raw_pair() as (near, far):
        body = bytes(300_000)
        sending = asyncio.ensure_future(
            asyncio.get_running_loop().sock_sendall(far, message(body) * 2)
        )
        await asyncio.sleep(0.4)
        assert bytes(await near.read()) == body
        assert bytes(await near.read()) == body
        await sending


async def test_idle_stream_between_living_processes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEPALIVE_SECONDS", 0.02)
    async with pair() as (one, other):
        await asyncio.sleep(0.3)
        one.send_message(b"still here")
        assert bytes(await other.read()) == b"still here"


async def test_peer_that_does_not_read_pauses_the_writer() -> None:
    async with raw_pair() as (near, far):
        part = bytes(1 << 20)
        sent = 0
        while near.paused_since is None:
            near.send_message(part)
            sent += 1
            assert sent < 64
        assert near.buffered_bytes > 0
        writing = asyncio.ensure_future(near.write(b"last"))
        await asyncio.sleep(0.1)
        assert not writing.done()
        loop, left = asyncio.get_running_loop(), sent * (len(part) + 8) + len(message(b"last"))
        while left:
            left -= len(await loop.sock_recv(far, 1 << 20))
        await writing
        assert near.buffered_bytes == 0


async def test_stream_closed_when_it_takes_data_again_ends_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with raw_pair() as (near, far):
        while near.paused_since is None:
            near.send_message(bytes(1 << 20))
        delivering = asyncio.ensure_future(near.deliver_to(lambda _: None, near.close))
        with contextlib.suppress(ConnectionError):
            while await asyncio.get_running_loop().sock_recv(far, 1 << 20):
                pass
        with pytest.raises(StreamBroken, match="was closed"):
            await delivering
        await asyncio.sleep(0.05)
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_reader_that_is_slow_stops_the_sender() -> None:
    async with pair() as (one, other):
        part = bytes(100_000)
        while one.paused_since is None:
            one.send_message(part)
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
        assert one.paused_since is not None, "the other end does not read"
        writing = asyncio.ensure_future(one.write(b"last"))
        while bytes(await other.read()) != b"last":
            pass
        await writing


async def test_end_has_a_status_and_a_reason() -> None:
    async with pair() as (one, other):
        one.send_message(b"a result")
        ending = asyncio.ensure_future(
            one.end_gracefully(
                NEVER, CallRefused(CallStatus.RESOURCE_EXHAUSTED, "too much\nis asked for")
            )
        )
        assert bytes(await other.read()) == b"a result"
        with pytest.raises(StreamBroken, match=r"^too much$") as refused:
            await other.read()
        assert refused.value.status == CallStatus.RESOURCE_EXHAUSTED
        await ending


async def test_reason_of_a_stranger_forges_no_lines() -> None:
    async with raw_pair() as (near, far):
        body = "INTERNAL\nit failed\r\x1b[31m2026 ERROR\u2028\x85forged\nmore".encode()
        far.send(header(END, len(body)) + body)
        with pytest.raises(StreamBroken) as ended:
            await near.read()
        assert str(ended.value) == "it failed  [31m2026 ERROR  forged"


async def test_long_reason_is_cut() -> None:
    async with pair() as (one, other):
        ending = asyncio.ensure_future(
            one.end_gracefully(
                NEVER, CallRefused(CallStatus.INTERNAL, "it failed: " + "x" * 100_000)
            )
        )
        with pytest.raises(StreamBroken, match="it failed: xxx") as ended:
            await other.read()
        assert ended.value.status == CallStatus.INTERNAL
        await ending


async def test_end_reaches_a_peer_whose_input_was_not_read() -> None:
    async with pair() as (one, other):
        for _ in range(50):
            other.send_message(bytes(100_000))
        ending = asyncio.ensure_future(
            one.end_gracefully(NEVER, CallRefused(CallStatus.INTERNAL, "it failed"))
        )
        with pytest.raises(StreamBroken, match="it failed"):
            await other.read()
        await ending


async def test_everything_sent_before_the_end_is_read() -> None:
    async with pair() as (one, other):
        for number in range(40):
            one.send_message(b"%d" % number + bytes(100_000))
        one.finish_writing()
        for number in range(40):
            assert bytes(await other.read()).startswith(b"%d" % number)
        with pytest.raises(StreamBroken, match="the peer ended the stream"):
            await other.read()


async def test_keepalives_do_not_break_a_stream_that_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream, "KEEPALIVE_SECONDS", 0.02)
    async with raw_pair() as (near, far):
        near.send_message(b"a result")
        ending = asyncio.ensure_future(near.end_gracefully(NEVER))
        for _ in range(10):
            far.send(header(KEEPALIVE, 0))
            await asyncio.sleep(0.02)
        assert not ending.done(), "the peer may take its time"
        assert far.recv(100).replace(header(KEEPALIVE, 0), b"") == message(b"a result")
        assert far.recv(100) == b"", "nothing follows the end"
        far.close()
        await ending
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_stream_that_was_reset_ends_in_silence() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    _, made = await loop.create_connection(MessageStream, sock=near)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()  # a reset, which the loop has not seen
    made.finish_writing()
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(StreamBroken):
            await made.read()


async def test_lost_connection_wakes_readers_and_writers() -> None:
    async with raw_pair() as (near, far):
        while near.paused_since is None:
            near.send_message(bytes(1 << 20))
        waiting = [asyncio.ensure_future(near.read()), asyncio.ensure_future(near.write(b"x"))]
        await asyncio.sleep(0.05)
        far.close()
        for each in waiting:
            with pytest.raises(StreamBroken):
                await each
