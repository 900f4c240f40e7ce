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

MARK = "x-modelswarm-forwarded"
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 120.0  # a gateway that holds a stream says so every few seconds
LOOK_SECONDS = 1.0  # between looks whether a gateway that says nothing still lives
PASSED_ON = ("authorization", "last-event-id")
PASSED_BACK = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")
MOST_CONNECTIONS = 4096
UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True, slots=True)
class Original:
    """The request as it came."""

    path: str
    headers: Mapping[str, str]
    body: object


T = TypeVar("T")
Lives = Callable[[], Awaitable[bool]]


class Unreachable(Exception):
    """There is no connection to it."""


class Gone(Exception):
    """Who was to answer does so no more: its connection broke, its session went elsewhere, or servers have not heard it
    for a lease and it does not answer us either."""


async def watched(step: Awaitable[T], lives: Lives) -> T:
    """What a step of the other gateway comes to, as long as that takes. Raises Gone."""
    doing = asyncio.ensure_future(step)
    try:
        while not (await asyncio.wait({doing}, timeout=LOOK_SECONDS))[0]:
            if not await lives():
                raise Gone
        return await doing
    finally:
        doing.cancel()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the other gateway says. To read on raises Gone when it stops in the middle."""

    status: int
    headers: list[tuple[bytes, bytes]]
    parts: AsyncIterator[bytes]


class Passing:
    def __init__(self) -> None:
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=MOST_CONNECTIONS),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def answers(self, target: str) -> bool:
        """Whether the gateway there says anything at all. Servers do not know a session that waits without any of them:
        then only its gateway can tell that it is still there."""
        try:
            await self._client.get(f"http://{target}/health", timeout=CONNECT_SECONDS)
        except (httpx.HTTPError, OSError):
            return False
        return True

    @contextlib.asynccontextmanager
    async def on(
        self, target: str, original: Original, after: str | None, lives: Lives
    ) -> AsyncIterator[Answer]:
        """Asks there, for what follows the event `after` if that is given. Raises Unreachable, or Gone."""
        headers = {n: original.headers[n] for n in PASSED_ON if n in original.headers}
        headers |= {"content-type": "application/json", MARK: "1"}
        if after is not None:
            headers["last-event-id"] = after
        request = self._client.build_request(
            "POST",
            f"http://{target}{original.path}",
            headers=headers,
            content=json.dumps(original.body).encode(),
        )
        try:
            answer = await watched(self._client.send(request, stream=True), lives)
        except UNREACHED as error:
            raise Unreachable(f"{target}: {error!r}") from error
        except (httpx.HTTPError, OSError) as error:
            raise Gone from error
        back = [
            (n.encode(), answer.headers[n].encode()) for n in PASSED_BACK if n in answer.headers
        ]
        try:
            yield Answer(answer.status_code, back, _parts(answer, lives))
        finally:
            await asyncio.shield(answer.aclose())


async def _parts(answer: httpx.Response, lives: Lives) -> AsyncIterator[bytes]:
    parts = answer.aiter_bytes()
    try:
        while (part := await watched(anext(parts, None), lives)) is not None:
            yield part
    except (httpx.HTTPError, OSError) as error:
        raise Gone from error
