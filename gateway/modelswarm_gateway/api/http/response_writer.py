"""Writes one HTTP response to the ASGI server: its start once, then its body and keepalive comments.

Used by a generation's response and by the relay of another gateway's response. Knows no sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.types import Send

from modelswarm_gateway.api.http.openai_responses import keepalive_comment

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

    async def write_keepalive(self, reason: str = "") -> None:
        """Send a keepalive, so that client and proxies see that the stream is alive. Starts the stream if needed."""
        await self.start_stream()
        await self.write(self._format_keepalive(reason))
