"""Forwards a request to the gateway that owns its session, and returns the response as it arrives (R20, takeover).

Used by both APIs. A request is forwarded once: a header marks it, and the gateway that receives it answers or refuses.
A stalled gateway keeps its connections open, so a waiting forwarder checks now and then that it is alive. Knows no
sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx
from starlette.responses import Response

from modelswarm.process.socket_options import keepalive_options
from modelswarm_gateway.settings import SESSION_HEADER

FORWARDED_HEADER = "x-modelswarm-forwarded"
CONNECT_SECONDS = 2.0
# Seconds to send a request, and for the whole response to one with a body that is not a turn.
READ_SECONDS = 120.0
# A whole answer sends nothing until its end, which may take many minutes. The kernel probes the silent connection, and
# breaks it after some 45 s without an answer.
_PROBES = keepalive_options(idle_seconds=15)
# Seconds between checks that a silent gateway is alive.
ALIVE_CHECK_SECONDS = 1.0
# Seconds for the whole response to a request without a body.
CALL_SECONDS = 5.0
REQUEST_HEADERS = ("authorization", "last-event-id", "traceparent", "tracestate", "x-request-id")
RESPONSE_HEADERS = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")
MAX_CONNECTIONS = 4096
CONNECT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True, slots=True)
class OriginalRequest:
    """The request as the client sent it."""

    path: str
    headers: Mapping[str, str]
    body: object


T = TypeVar("T")
AliveCheck = Callable[[], Awaitable[bool]]


class PeerUnreachable(Exception):
    """No connection to the other gateway can be made."""


class PeerGone(Exception):
    """The other gateway stopped answering: its connection broke, its session moved, or it was silent.

    Silent means that servers received nothing from it for a lease and it does not respond to us either.
    """


async def await_while_alive(step: Awaitable[T], is_alive: AliveCheck) -> T:
    """Await `step` as long as `is_alive` returns True at each check. Raise PeerGone otherwise."""
    task = asyncio.ensure_future(step)
    try:
        while not (await asyncio.wait({task}, timeout=ALIVE_CHECK_SECONDS))[0]:
            if not await is_alive():
                raise PeerGone
        return await task
    finally:
        task.cancel()


@dataclass(frozen=True, slots=True)
class ForwardedResponse:
    """Response of the other gateway. Reading `parts` raises PeerGone if it stops in the middle."""

    status: int
    headers: list[tuple[bytes, bytes]]
    parts: AsyncIterator[bytes]


class Forwarder:
    def __init__(self) -> None:
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS, read=None),
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
                trust_env=False,
                socket_options=_PROBES,
            ),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def is_responding(self, target: str) -> bool:
        """Return whether the gateway at `target` responds. Servers do not know a session that waits without any
        server, so only its gateway can tell that it is still there."""
        try:
            await self._client.get(f"http://{target}/health", timeout=CONNECT_SECONDS)
        except (httpx.HTTPError, OSError):
            return False
        return True

    async def call(
        self,
        method: str,
        target: str,
        path: str,
        params: Mapping[str, str],
        headers: Mapping[str, str],
        body: object = None,
    ) -> httpx.Response:
        """Send a request with `headers` of the client and a JSON `body`, or none; return the whole response.

        One with a body may take time, as a fork that copies KV does: it is awaited while the gateway responds. Raise
        PeerUnreachable.
        """
        seconds = CALL_SECONDS if body is None else READ_SECONDS
        sent = self._client.request(
            method,
            f"http://{target}{path}",
            params=dict(params),
            headers=_forwarded_headers(headers),
            timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS),
            json=body,
        )
        try:
            return await await_while_alive(sent, lambda: self.is_responding(target))
        except (httpx.HTTPError, OSError, PeerGone) as error:
            raise PeerUnreachable(f"{target}: {error!r}") from error

    @contextlib.asynccontextmanager
    async def forward(
        self,
        target: str,
        original: OriginalRequest,
        last_event_id: str | None,
        is_alive: AliveCheck,
    ) -> AsyncIterator[ForwardedResponse]:
        """Send the request to `target`, for what follows the event `last_event_id` if that is given.

        Raise PeerUnreachable or PeerGone.
        """
        headers = _forwarded_headers(original.headers)
        headers["content-type"] = "application/json"
        if last_event_id is not None:
            headers["last-event-id"] = last_event_id
        request = self._client.build_request(
            "POST",
            f"http://{target}{original.path}",
            headers=headers,
            content=json.dumps(original.body).encode(),
        )
        async with contextlib.AsyncExitStack() as taken:

            async def send() -> httpx.Response:
                """Return the answer. It is closed also if it comes when the wait for it has ended."""
                answer = await self._client.send(request, stream=True)
                taken.push_async_callback(lambda: asyncio.shield(answer.aclose()))
                return answer

            try:
                answer = await await_while_alive(send(), is_alive)
            except CONNECT_ERRORS as error:
                raise PeerUnreachable(f"{target}: {error!r}") from error
            except (httpx.HTTPError, OSError) as error:
                raise PeerGone from error
            back = [
                (n.encode(), answer.headers[n].encode())
                for n in RESPONSE_HEADERS
                if n in answer.headers
            ]
            yield ForwardedResponse(answer.status_code, back, _read_parts(answer, is_alive))


def whole_answer(answer: httpx.Response) -> Response:
    """Return the other gateway's whole answer for the client, with its status and headers."""
    names = (*RESPONSE_HEADERS, SESSION_HEADER)
    headers = {name: answer.headers[name] for name in names if name in answer.headers}
    return Response(answer.content, answer.status_code, headers)


def _forwarded_headers(headers: Mapping[str, str]) -> httpx.Headers:
    """Return the headers to send, of the bytes that the client sent: starlette reads each byte as one character."""
    passed_on = {name: headers[name] for name in REQUEST_HEADERS if name in headers}
    return httpx.Headers(passed_on | {FORWARDED_HEADER: "1"}, encoding="latin-1")


async def _read_parts(answer: httpx.Response, is_alive: AliveCheck) -> AsyncIterator[bytes]:
    parts = answer.aiter_bytes()
    try:
        while (part := await await_while_alive(anext(parts, None), is_alive)) is not None:
            yield part
    except (httpx.HTTPError, OSError) as error:
        raise PeerGone from error
