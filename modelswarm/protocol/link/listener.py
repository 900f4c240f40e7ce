"""Opens and accepts the TCP connections of links and of calls between a gateway and a server.

The first message on a connection names a lane of a link, or a method. `open_stream` is the dialling side, `Listener`
the accepting one. Called by `links.py` and by the callers of methods. Does not know the content of messages. TLS
belongs in `open_stream` and `Listener.start`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from modelswarm.process.socket_options import listen_on
from modelswarm.protocol.link.stream import (
    UNACKNOWLEDGED_SECONDS,
    CallRefused,
    CallStatus,
    MessageStream,
    Stream,
    StreamBroken,
)
from modelswarm.protocol.messages import Lane

log = logging.getLogger(__name__)

_SERVICE = "/modelswarm.link.v1.Link"
_LANES_BY_NAME = {f"{_SERVICE}/{lane.value.title()}": lane for lane in Lane}
_NAMES_BY_LANE = {lane: name for name, lane in _LANES_BY_NAME.items()}

MAX_OPENING = 256
"""Accepted connections at a time that have not said what they are for."""
OPENING_SECONDS = 5.0
"""Time in which they must."""
MAX_CALLS = 1024
"""Calls of methods at a time."""

# Until the next address of a name is tried, beside the first one (RFC 8305, section 5).
_NEXT_ADDRESS_SECONDS = 0.25
_BACKLOG = 1024
# In a pass of the loop. asyncio logs as many errors when the process has no descriptor left.
_ACCEPTED = 16
_REFUSAL_SECONDS = 1.0  # for a refused peer to read the reason
_RESULT_SECONDS = 60.0  # for a caller to read the last of its result
_STOP_SECONDS = 0.2  # for running calls, when the listener stops

ServeCall = Callable[[Stream], Awaitable[None]]


class Listener:
    """Accepts lanes and calls on one port. A lane ends when `accept` returns; raising StreamBroken refuses it.

    `calls`: methods of the port, by their names.
    """

    def __init__(
        self,
        accept: Callable[[Lane, MessageStream], Awaitable[None]],
        calls: Mapping[str, ServeCall] | None = None,
    ) -> None:
        self._accept = accept
        self._calls = calls or {}
        self._opening = self._running_calls = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, target: str) -> str:
        """Listen, and return the bound "host:port". Raises OSError if the target cannot be bound."""
        host, _, port = target.rpartition(":")
        bound = listen_on(host.strip("[]"), int(port), _BACKLOG)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: MessageStream(self._on_opened), sock=bound, backlog=_ACCEPTED
        )
        bound.listen(_BACKLOG)  # which asyncio has made as small
        return f"{host}:{bound.getsockname()[1]}"

    async def stop(self) -> None:
        """Accept no more; end what runs, some time later."""
        if self._server is not None:
            self._server.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_opened(self, stream: MessageStream) -> None:
        task = asyncio.get_running_loop().create_task(self._run(stream))
        stream.on_lost = task.cancel
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("internal error in an accepted connection", exc_info=error)

    async def _run(self, stream: MessageStream) -> None:
        try:
            await self._serve(await self._read_name(stream), stream)
        except (StreamBroken, CallRefused) as refusal:
            await stream.end_gracefully(_REFUSAL_SECONDS, refusal)
        finally:
            stream.close()

    async def _read_name(self, stream: MessageStream) -> str:
        if self._opening >= MAX_OPENING:
            raise StreamBroken(f"{MAX_OPENING} connections are being opened already; try again")
        self._opening += 1
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                return bytes(await stream.read()).decode("ascii", "replace")
        except TimeoutError:
            raise StreamBroken("the connection did not say what it is for") from None
        finally:
            self._opening -= 1

    async def _serve(self, name: str, stream: MessageStream) -> None:
        lane, call = _LANES_BY_NAME.get(name), self._calls.get(name)
        if lane is not None:
            stream.limit_silence(UNACKNOWLEDGED_SECONDS)
            await self._accept(lane, stream)
        elif call is None:
            raise CallRefused(CallStatus.UNIMPLEMENTED, "there is no such method here")
        elif self._running_calls >= MAX_CALLS:
            raise CallRefused(CallStatus.RESOURCE_EXHAUSTED, f"{MAX_CALLS} calls run already")
        else:
            self._running_calls += 1
            try:
                await call(stream)
                await stream.end_gracefully(_RESULT_SECONDS)
            finally:
                self._running_calls -= 1


async def open_lane(target: str, lane: Lane) -> MessageStream:
    """Open a lane of a link. Raise StreamBroken, or ValueError for what is no address."""
    stream = await _connect(target, _NAMES_BY_LANE[lane])
    stream.limit_silence(UNACKNOWLEDGED_SECONDS)
    return stream


@contextlib.asynccontextmanager
async def open_call(target: str, method: str) -> AsyncIterator[MessageStream]:
    """Open the call of a method, which ends with the context. Raise StreamBroken, or ValueError as above."""
    stream = await _connect(target, method)
    try:
        yield stream
    finally:
        stream.close()


async def _connect(target: str, name: str) -> MessageStream:
    host, _, digits = target.rpartition(":")
    port = int(digits)
    if not 0 < port < 1 << 16:  # a resolver would take the last 16 bits of it
        raise ValueError(f"port {port}; allowed: 1 to 65535")
    loop = asyncio.get_running_loop()
    try:
        _, stream = await loop.create_connection(
            MessageStream, host.strip("[]"), port, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS
        )
    except OSError as error:
        raise StreamBroken(_dial_failure(error)) from error
    stream.send_message(name.encode())
    return stream


def _dial_failure(error: OSError) -> str:
    """Return the reason of a failed dial. asyncio puts an address in its place, or those of all that were tried."""
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    numbers = set(re.findall(r"\[Errno (\d+)\]", str(error)))
    return os.strerror(int(numbers.pop())) if len(numbers) == 1 else str(error)
