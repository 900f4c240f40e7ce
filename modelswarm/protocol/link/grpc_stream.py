"""Byte streams between two processes: the one module of the links that knows gRPC.

`DialledStream` opens one lane on a connection of its own, `Listener` accepts lanes. Both transfer whole messages, and
every error by which gRPC ends a stream becomes StreamBroken. Called by `links.py`. Does not know the content of the
bytes. TLS belongs into `open_channel` and `Listener.start`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

import grpc
import grpc.aio

from modelswarm.protocol.messages import Lane
from modelswarm.protocol.wire.frames import MAX_FRAME

_SERVICE = "modelswarm.link.v1.Link"
_LANES_BY_METHOD = {f"/{_SERVICE}/{lane.value.title()}": lane for lane in Lane}
_METHODS_BY_LANE = {lane: path for path, lane in _LANES_BY_METHOD.items()}

# Lanes that one connection may open; a link's two lanes have a connection each.
MAX_STREAMS = 64

_COMMON_OPTIONS = [
    # gRPC refuses a larger message by the length that precedes it. 64 KiB are more than any overhead.
    ("grpc.max_receive_message_length", MAX_FRAME + (64 << 10)),
    ("grpc.max_send_message_length", -1),
    # A dead process is detected by its closed socket; keepalive detects dead machines and network partitions. The
    # timeout also sets TCP_USER_TIMEOUT: two seconds after the first unacknowledged data, the link is closed.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
]
_CLIENT_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # live and bulk never share a connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
]
_SERVER_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # a port in use is an error
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]


class StreamBroken(ConnectionError):
    """The stream has ended or could not be opened; the message is the reason."""


class CallRefused(Exception):
    """Ends an accepted call with this status; the message is the sentence for the caller."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class Stream(Protocol):
    async def read(self) -> bytes:
        """Wait for the next message and return it."""
        ...

    async def write(self, data: bytes) -> None:
        """Return when the peer's flow control has accepted the data. Waits forever if the peer does not read."""
        ...


class DialledStream:
    """One lane opened by this process, on its own connection. The first write connects."""

    def __init__(self, target: str, lane: Lane) -> None:
        self._channel = open_channel(target)
        method: Any = self._channel.stream_stream  # its type requires serializers; bytes need none
        self._call: Any = method(_METHODS_BY_LANE[lane])()

    async def read(self) -> bytes:
        with _translate_errors():
            data = await self._call.read()
        return _check_message(data)

    async def write(self, data: bytes) -> None:
        with _translate_errors():
            await self._call.write(data)

    async def finish_writing(self) -> None:
        """Signal the end of writing. The peer ends the stream when it has read all messages."""
        with _translate_errors():
            await self._call.done_writing()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close(None)


class AcceptedStream:
    """One lane opened by a peer. It ends when the coroutine that accepted it returns."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> bytes:
        with _translate_errors():
            data = await self._context.read()
        return _check_message(data)

    async def write(self, data: bytes) -> None:
        with _translate_errors():
            await self._context.write(data)


ServeCall = Callable[[Stream], Awaitable[None]]


class Listener(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Accepts lanes on one port. A lane ends when `accept` returns; raising StreamBroken refuses it.

    `calls`: other methods of the port, by their paths.
    """

    def __init__(
        self,
        accept: Callable[[Lane, Stream], Awaitable[None]],
        calls: Mapping[str, ServeCall] | None = None,
    ) -> None:
        self._accept = accept
        self._calls = calls or {}
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))

    async def start(self, target: str) -> str:
        """Listen, and return the bound "host:port". Raises OSError if the target cannot be bound."""
        host, _, port = target.rpartition(":")
        _try_bind(host.strip("[]"), int(port))
        try:
            bound = self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {target}") from error
        await self._server.start()
        return f"{host}:{bound}"

    async def stop(self) -> None:
        await self._server.stop(0.2)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        lane = _LANES_BY_METHOD.get(handler_call_details.method)
        if lane is None:
            return self._find_call(handler_call_details.method)

        async def run(_: object, context: Any) -> None:
            try:
                await self._accept(lane, AcceptedStream(context))
            except StreamBroken as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

        return grpc.stream_stream_rpc_method_handler(run)

    def _find_call(self, method: str) -> Any:
        serve = self._calls.get(method)
        if serve is None:
            return None

        async def run(_: object, context: Any) -> None:
            try:
                await serve(AcceptedStream(context))
            except CallRefused as error:
                await context.abort(error.code, str(error))
            except StreamBroken as error:
                await context.abort(grpc.StatusCode.CANCELLED, str(error))

        return grpc.stream_stream_rpc_method_handler(run)


def open_channel(target: str) -> grpc.aio.Channel:
    """Return a connection of its own, which is made by the first call."""
    return grpc.aio.insecure_channel(target, options=_CLIENT_OPTIONS)


def _try_bind(host: str, port: int) -> None:
    """Bind the address once before gRPC does, whose own error gives no reason and is printed to stderr."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a host name") from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise StreamBroken in place of gRPC's errors about an ended stream."""
    try:
        yield
    except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        raise StreamBroken(_first_line(error)) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise StreamBroken("the stream was cancelled") from error


def _check_message(data: Any) -> bytes:
    if not isinstance(data, bytes):  # grpc.aio.EOF
        raise StreamBroken("the peer ended the stream")
    return data


def _first_line(error: Exception) -> str:
    details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return (details or type(error).__name__).splitlines()[0]
