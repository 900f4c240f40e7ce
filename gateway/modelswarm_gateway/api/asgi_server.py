"""Serves an ASGI app on a socket that was bound before: uvicorn, without its signal handlers and logs.

Used by `app.py` for the HTTP API and for the metrics. Knows no routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from modelswarm.errors import UserError
from modelswarm.process.command_line import join_target, split_target
from modelswarm.process.socket_options import limit_unread, listen_on
from modelswarm_gateway.api.http_protocol import (
    HEAD_SECONDS,
    MAX_HEAD_BYTES,
    JsonErrorProtocol,
    ServerConfig,
)
from modelswarm_gateway.runtime.file_limit import connection_limit

# Bytes that the kernel may hold for a client that does not read (R7, credit).
SEND_BUFFER = 64 << 10
# Seconds after which the kernel breaks a connection whose client takes nothing of what was sent. A turn ends as unread
# before that, so that its client still gets the error.
UNTAKEN_SECONDS = 240.0
START_SECONDS = 10.0
BACKLOG = 2048
# Connections that are accepted in a pass of the loop. asyncio logs as many errors when no more files can be opened.
ACCEPTED = 16
# Seconds for responses that are being written when the process ends.
GRACE_SECONDS = 1


def bind_socket(field: str, target: str) -> socket.socket:
    """Bind and listen on `target`. Raise UserError if that is not possible; `field` is the flag it came from."""
    host, port = split_target(field, target)
    try:
        # With its IPPROTO_TCP asyncio turns off Nagle's algorithm; else every response waits 40 ms for an ack.
        made = listen_on(host, port, BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            field, f"cannot listen on {target}: {reason}; allowed: a free port, or 0"
        ) from error
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
    limit_unread(made, UNTAKEN_SECONDS)  # also of clients that vanished
    made.setblocking(False)
    return made


class _UvicornServer(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AsgiServer:
    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        *,
        head_seconds: float = HEAD_SECONDS,
        max_connections: int | None = None,
    ) -> None:
        """`head_seconds`: time limit for the head of a request. `max_connections`: by default a share of the files
        that this process may open."""
        host, port = bound.getsockname()[:2]
        self.target = join_target(host, port)
        self._socket = bound
        config = ServerConfig(
            app,
            loop="asyncio",
            http=JsonErrorProtocol,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            backlog=ACCEPTED,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        config.head_seconds, config.idle = head_seconds, {}
        config.max_connections = max_connections or connection_limit()
        self._server = _UvicornServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        async with asyncio.timeout(START_SECONDS):
            while not self._server.started:  # uvicorn has no event for it
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.005)
        self._socket.listen(BACKLOG)  # which asyncio has made as small as ACCEPTED

    def close_idle_connections(self) -> None:
        """Close the connections without a running request, as uvicorn does when it stops.

        New connections stay open: their first request is on its way, and is refused with an error.
        """
        for connection in tuple(self._server.server_state.connections):
            if isinstance(connection, JsonErrorProtocol) and connection.cycle is not None:
                connection.shutdown()

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
