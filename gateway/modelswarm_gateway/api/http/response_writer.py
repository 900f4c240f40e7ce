"""Writes one HTTP response to the ASGI server: its start once, then its body and keepalive comments.

Used by a generation's response and by the relay of another gateway's response. Knows no sessions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from starlette.types import Send

from modelswarm_gateway.api.http.logprobs_json import LazyList
from modelswarm_gateway.api.http.openai_responses import keepalive_comment

_PIECES_AT_ONCE = 64
"""Pieces of a body that are encoded before other tasks run: some 8 ms for log probabilities with 20 alternatives."""
_BYTES_AT_ONCE = 1 << 20
"""Bytes of a body that are given to the ASGI server at once."""

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ResponseWriter:
    def __init__(
        self,
        send: Send,
        headers: Sequence[tuple[bytes, bytes]] = (),
        format_keepalive: Callable[[str], bytes] = keepalive_comment,
    ) -> None:
        """`headers` are added to those of each start. `format_keepalive`: makes a keepalive of its reason."""
        self._send, self._headers, self._format_keepalive = send, headers, format_keepalive
        self.has_started = False

    async def start(self, headers: list[tuple[bytes, bytes]], status: int = 200) -> None:
        """Send status and headers; has no effect if they were sent before."""
        if self.has_started:
            return
        all_headers = [*headers, *self._headers]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        self.has_started = True

    async def start_stream(self) -> None:
        await self.start(list(STREAM_HEADERS))

    async def write(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def write_json(self, body: Mapping[str, Any]) -> None:
        """Send a whole response. Other tasks run while a long one, as with the scores of a prompt, is encoded."""
        encoded = bytearray()
        for count, piece in enumerate(json_pieces(body), 1):
            encoded += piece.encode()
            if count % _PIECES_AT_ONCE == 0:
                await asyncio.sleep(0)
        length = str(len(encoded)).encode()
        await self.start([(b"content-type", b"application/json"), (b"content-length", length)])
        for begin in range(0, len(encoded), _BYTES_AT_ONCE):
            end = begin + _BYTES_AT_ONCE
            await self.write(bytes(encoded[begin:end]), more=end < len(encoded))

    async def write_keepalive(self, reason: str = "") -> None:
        """Send a keepalive, so that client and proxies see that the stream is alive. Starts the stream if needed."""
        await self.start_stream()
        await self.write(self._format_keepalive(reason))


def json_pieces(value: object) -> Iterator[str]:
    """Return the text of `json.dumps(value)` in pieces. A lazy list has a piece for each entry."""
    match value:
        case Mapping():
            comma = "{"
            for name, item in value.items():
                yield f"{comma}{json.dumps(name)}: "
                yield from json_pieces(item)
                comma = ", "
            yield "{}" if comma == "{" else "}"
        case LazyList():
            comma = "["
            for item in value:
                yield comma + json.dumps(item)
                comma = ", "
            yield "[]" if comma == "[" else "]"
        case [Mapping(), *_]:
            comma = "["
            for item in value:
                yield comma
                yield from json_pieces(item)
                comma = ", "
            yield "]"
        case _:
            yield json.dumps(value)
