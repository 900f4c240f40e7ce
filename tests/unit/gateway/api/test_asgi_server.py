"""The connections of the HTTP server when its gateway stops."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send
from support.eventually import SECONDS

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
