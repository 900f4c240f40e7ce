"""Passes a request on to the gateway that holds its session, and its answer back as it comes (R20).

Used by the doors. A request is passed on by one gateway only: the mark on it says so, and whoever gets it so answers or
refuses.
A gateway that stands still keeps its connections: who waits for it asks now and then whether it lives. Knows nothing of
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

FORWARDED_HEADER = "x-modelswarm-forwarded"
CONNECT_SECONDS = 2.0
READ_SECONDS = 120.0  # a gateway that holds a stream says so every few seconds
ALIVE_CHECK_SECONDS = 1.0  # between looks whether a gateway that says nothing still lives
REQUEST_HEADERS = ("authorization", "last-event-id")
RESPONSE_HEADERS = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")
MAX_CONNECTIONS = 4096
CONNECT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True, slots=True)
class OriginalRequest:
    """The request as it came."""

    path: str
    headers: Mapping[str, str]
    body: object


T = TypeVar("T")
AliveCheck = Callable[[], Awaitable[bool]]


class PeerUnreachable(Exception):
    """There is no connection to it."""


class PeerGone(Exception):
    """Who was to answer does so no more: its connection broke, its session went elsewhere, or servers have not heard it
    for a lease and it does not answer us either."""


async def await_while_alive(step: Awaitable[T], is_alive: AliveCheck) -> T:
    """What a step of the other gateway comes to, as long as that takes. Raises Gone."""
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
    """What the other gateway says. To read on raises Gone when it stops in the middle."""

    status: int
    headers: list[tuple[bytes, bytes]]
    parts: AsyncIterator[bytes]


class Forwarder:
    def __init__(self) -> None:
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def is_responding(self, target: str) -> bool:
        """Whether the gateway there says anything at all. Servers do not know a session that waits without any of them:
        then only its gateway can tell that it is still there."""
        try:
            await self._client.get(f"http://{target}/health", timeout=CONNECT_SECONDS)
        except (httpx.HTTPError, OSError):
            return False
        return True

    @contextlib.asynccontextmanager
    async def forward(
        self,
        target: str,
        original: OriginalRequest,
        last_event_id: str | None,
        is_alive: AliveCheck,
    ) -> AsyncIterator[ForwardedResponse]:
        """Asks there, for what follows the event `after` if that is given. Raises Unreachable, or Gone."""
        headers = {n: original.headers[n] for n in REQUEST_HEADERS if n in original.headers}
        headers |= {"content-type": "application/json", FORWARDED_HEADER: "1"}
        if last_event_id is not None:
            headers["last-event-id"] = last_event_id
        request = self._client.build_request(
            "POST",
            f"http://{target}{original.path}",
            headers=headers,
            content=json.dumps(original.body).encode(),
        )
        try:
            answer = await await_while_alive(self._client.send(request, stream=True), is_alive)
        except CONNECT_ERRORS as error:
            raise PeerUnreachable(f"{target}: {error!r}") from error
        except (httpx.HTTPError, OSError) as error:
            raise PeerGone from error
        back = [
            (n.encode(), answer.headers[n].encode())
            for n in RESPONSE_HEADERS
            if n in answer.headers
        ]
        try:
            yield ForwardedResponse(answer.status_code, back, _read_parts(answer, is_alive))
        finally:
            await asyncio.shield(answer.aclose())


async def _read_parts(answer: httpx.Response, is_alive: AliveCheck) -> AsyncIterator[bytes]:
    parts = answer.aiter_bytes()
    try:
        while (part := await await_while_alive(anext(parts, None), is_alive)) is not None:
            yield part
    except (httpx.HTTPError, OSError) as error:
        raise PeerGone from error
