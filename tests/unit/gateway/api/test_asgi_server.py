"""The connections of the HTTP server when its gateway stops."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send
from support.eventually import SECONDS

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
