"""The connections of the HTTP server: when its gateway stops, and when there are too many."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send
from support.eventually import SECONDS
from support.ports import loopback_hosts

from modelswarm_gateway.api import asgi_server
from modelswarm_gateway.api.asgi_server import AsgiServer, bind_socket

REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 503, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_closing_idle_connections_keeps_new_ones() -> None:
    server = AsgiServer(app, bind_socket("--http", "127.0.0.1:0"))
    await server.start()
    host, _, port = server.target.partition(":")
    idle, to_idle = await asyncio.open_connection(host, int(port))
    to_idle.write(REQUEST)
    assert b"503" in await asyncio.wait_for(idle.readline(), SECONDS)
    new, to_new = await asyncio.open_connection(host, int(port))
    await asyncio.sleep(0.1)  # the server accepts it; if not, the assertions hold too
    server.close_idle_connections()
    async with asyncio.timeout(SECONDS):
        await idle.read()  # until the server closes it
        to_new.write(REQUEST)
        assert b"503" in await new.readline()
    to_idle.close()
    to_new.close()
    await server.stop()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
async def test_connection_ends_whose_client_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_server, "UNTAKEN_SECONDS", 0.5)
    left = asyncio.Event()

    async def send_much(scope: Scope, receive: Receive, send: Send) -> None:
        """Send 8 MiB, more than all buffers hold, and wait until the client has left."""
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(8):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        await receive()
        left.set()

    server = AsgiServer(send_much, bind_socket("--http", "127.0.0.1:0"))
    await server.start()
    host, _, port = server.target.partition(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(REQUEST)
    await asyncio.wait_for(left.wait(), SECONDS)
    client.close()
    await server.stop()


async def test_new_connection_takes_the_place_of_the_idlest() -> None:
    server = AsgiServer(app, bind_socket("--http", "127.0.0.1:0"), max_connections=2)
    await server.start()
    host, _, port = server.target.partition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    async with asyncio.timeout(SECONDS):
        for reader, writer in reversed(opened):  # the first one is idle last
            writer.write(REQUEST)
            assert b"503" in await reader.readuntil(b"0\r\n\r\n")
        opened.append(await asyncio.open_connection(host, int(port)))
        assert await opened[1][0].read() == b""
        for reader, writer in (opened[0], opened[2]):
            writer.write(REQUEST)
            assert b"503" in await reader.readline()
    for _, writer in opened:
        writer.close()
    await server.stop()


async def test_connection_is_refused_while_all_are_busy() -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun.set()
        await may_end.wait()
        await app(scope, receive, send)

    server = AsgiServer(wait, bind_socket("--http", "127.0.0.1:0"), max_connections=1)
    await server.start()
    host, _, port = server.target.partition(":")
    busy, to_busy = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(SECONDS):
        to_busy.write(REQUEST)
        await has_begun.wait()
        late, to_late = await asyncio.open_connection(host, int(port))
        refusal = await late.read()
        may_end.set()
        assert b"503" in await busy.readline()
    assert b'"no_capacity"' in refusal and b"x-should-retry: true" in refusal
    assert b"retry-after: 1\r\n" in refusal and b"retry-after-ms: 1" in refusal
    to_busy.close()
    to_late.close()
    await server.stop()


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "[::]"])
async def test_wildcard_listens_at_addresses_of_both_families(wildcard: str) -> None:
    """As for links and gRPC: pods of an IPv6 cluster have no address of IPv4."""
    server = AsgiServer(app, bind_socket("--http", f"{wildcard}:0"))
    await server.start()
    for host in loopback_hosts():
        reader, writer = await asyncio.open_connection(host, int(server.target.rpartition(":")[2]))
        async with asyncio.timeout(SECONDS):
            writer.write(REQUEST)
            assert b"503" in await reader.readline()
        writer.close()
    await server.stop()


def test_name_of_both_families_listens_at_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts has both for localhost; clients ask 127.0.0.1."""
    kind = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    found = [(socket.AF_INET6, *kind, ("::1", 0, 0, 0)), (socket.AF_INET, *kind, ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with bind_socket("--http", "localhost:0") as bound:
        assert bound.getsockname()[0] == "127.0.0.1"


async def test_connection_whose_answer_is_being_sent_is_kept() -> None:
    size, has_answered = 8 << 20, asyncio.Event()  # more than all buffers hold

    async def send_much(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(size)})
        has_answered.set()

    server = AsgiServer(send_much, bind_socket("--http", "127.0.0.1:0"), max_connections=1)
    await server.start()
    host, _, port = server.target.partition(":")
    async with asyncio.timeout(SECONDS):
        slow, to_slow = await asyncio.open_connection(host, int(port))
        to_slow.write(REQUEST)
        await has_answered.wait()
        late, to_late = await asyncio.open_connection(host, int(port))
        assert b"503" in await late.readline()
        await slow.readuntil(b"\r\n\r\n")
        assert len(await slow.readexactly(size)) == size
    to_slow.close()
    to_late.close()
    await server.stop()
