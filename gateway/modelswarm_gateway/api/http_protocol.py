"""The HTTP/1.1 protocol of one connection: uvicorn's, with JSON errors for bytes that are no HTTP request.

Used by `asgi_server.py`. A framing fault gets OpenAI's error envelope, as every other failure does. A connection that
does not send a whole request head in time is closed. So is the longest idle one when there are too many, so that silent
clients cannot use up the file descriptors.
"""

from __future__ import annotations

import asyncio
import json
import sys
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from modelswarm_gateway.api.http.request_log import REQUEST_ID, assign_request_id, make_request_id
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.runtime.file_limit import MAX_CONNECTIONS

# Seconds from a connection's start, or from the first byte of a later request, to the end of the request's head.
# Also the seconds from a whole answer to the end of its request's body.
HEAD_SECONDS = 60.0
# Largest head of a request, in bytes.
MAX_HEAD_BYTES = 16 << 10
# First bytes of a TLS connection: a handshake record of any version.
TLS_HANDSHAKE = b"\x16\x03"
_RETRYABLE = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.SERVICE_UNAVAILABLE)


class ServerConfig(uvicorn.Config):
    """uvicorn's settings, with the seconds that a request's head may take, and the connections at a time."""

    head_seconds = HEAD_SECONDS
    max_connections = MAX_CONNECTIONS
    idle: dict[JsonErrorProtocol, None]
    """Connections without a whole head of a request, the longest idle one first."""


class JsonErrorProtocol(H11Protocol):
    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_seconds, self._max_connections = config.head_seconds, config.max_connections
        self._idle = config.idle
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle[self] = None
        self._start_head_timer()
        if len(self.connections) > self._max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_answered = self._is_answered
        super().data_received(data)
        if self._is_answered:
            return  # the timer runs: every byte would else give such a body more time
        is_idle = self.conn.their_state is h11.IDLE
        if not is_idle:
            self._idle.pop(self, None)
        if was_answered or not is_idle:
            self._stop_head_timer()
        if is_idle and not self.transport.is_closing():
            self._start_head_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self._idle[self] = None
        if self._is_answered and not self.transport.is_closing():
            self._start_head_timer()

    def _make_room(self) -> None:
        """Close the longest idle connection; refuse this one if no other is idle, or all have answers to send."""
        longest = next(each for each in self._idle if not each.transport.get_write_buffer_size())
        if longest is self:
            detail = f"{self._max_connections} connections have requests already; retry in 1 s"
            self._refuse(503, detail, Code.NO_CAPACITY, retry_after=1.0)
        else:
            del self._idle[longest]
            longest.transport.abort()

    @property
    def _is_answered(self) -> bool:
        """Return whether a request was answered before the end of its body."""
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP request. uvicorn calls this while it handles h11's error, which says more."""
        error = sys.exception()
        if not isinstance(error, h11.RemoteProtocolError):
            self._refuse(400, msg)
        elif self.conn.trailing_data[0].startswith(TLS_HANDSHAKE):
            self._refuse(
                400,
                "this port speaks plain HTTP, but the client began a TLS connection; use http:// instead of https://",
            )
        elif error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self._refuse(431, f"the head of a request may have {MAX_HEAD_BYTES >> 10} KiB at most")
        else:
            self._refuse(error.error_status_hint, f"this is not a valid HTTP/1.1 request: {error}")

    def _refuse(
        self,
        status: int,
        message: str,
        code: Code = Code.INVALID_REQUEST,
        retry_after: float | None = None,
    ) -> None:
        """Answer with an error, unless a response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            has_request = self.conn.our_state is h11.SEND_RESPONSE
            is_head = has_request and self.scope["method"] == "HEAD"
            error = ApiError(code, message, retry_after=retry_after)
            body = json.dumps(error.envelope()).encode()
            # The same bytes are as wrong the next time. A slow client may be faster, and a full port have room.
            advice = {"x-should-retry": "true" if status in _RETRYABLE else "false"}
            request_id = (
                assign_request_id(cast("Scope", self.scope)) if has_request else make_request_id()
            )
            headers = [
                (REQUEST_ID.encode(), request_id),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *(
                    (name.encode(), text.encode())
                    for name, text in (error.headers() | advice).items()
                ),
                (b"connection", b"close"),
            ]
            reason = HTTPStatus(status).phrase.encode()
            events: tuple[h11.Event, ...] = (
                h11.Response(status_code=status, headers=headers, reason=reason),
                h11.Data(data=b"" if is_head else body),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # the app must not answer behind this response
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_seconds, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        """Close the connection; one that has sent part of a request is told why."""
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            self._refuse(
                408, f"the head of the request did not arrive within {self._head_seconds:g} seconds"
            )
        else:
            self.shutdown()
