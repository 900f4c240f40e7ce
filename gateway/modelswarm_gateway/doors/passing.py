"""Passes a request on to the gateway that holds its session, and its answer back as it comes (R20).

Used by the doors. A request is passed on once: the mark on it says so, and whoever gets it so answers or refuses.
A gateway that stands still keeps its connections: who waits for it asks now and then whether it lives. Knows nothing of
sessions.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx

from modelswarm_gateway.errors import ApiError, Code

log = logging.getLogger(__name__)

MARK = "x-modelswarm-forwarded"
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 120.0  # a gateway that holds a stream says so every few seconds
LOOK_SECONDS = 1.0  # between looks whether a gateway that says nothing still lives
PASSED_ON = ("authorization", "last-event-id")
PASSED_BACK = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")
MOST_CONNECTIONS = 4096


@dataclass(frozen=True, slots=True)
class Original:
    """The request as it came."""

    path: str
    headers: Mapping[str, str]
    body: object


T = TypeVar("T")
Lives = Callable[[], Awaitable[bool]]
Begin = Callable[[int, list[tuple[bytes, bytes]]], Awaitable[None]]
Put = Callable[[bytes], Awaitable[None]]


class Unreachable(Exception):
    """Nothing was said yet: another way may be tried."""


class Gone(Exception):
    """Servers have not heard it for a lease, and it does not answer us either."""


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


def broken() -> ApiError:
    detail = "the gateway that holds this session is gone; go on with Last-Event-ID"
    return ApiError(Code.STREAM_BROKEN, detail, param="session_id")


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

    async def on(
        self, target: str, original: Original, begin: Begin, put: Put, lives: Lives
    ) -> None:
        """Raises Unreachable or Gone before anything was said, ApiError after."""
        headers = {n: original.headers[n] for n in PASSED_ON if n in original.headers}
        headers |= {"content-type": "application/json", MARK: "1"}
        request = self._client.build_request(
            "POST",
            f"http://{target}{original.path}",
            headers=headers,
            content=json.dumps(original.body).encode(),
        )
        try:
            answer = await watched(self._client.send(request, stream=True), lives)
        except (httpx.HTTPError, OSError) as error:
            raise Unreachable(f"{target}: {error!r}") from error
        try:
            back = [
                (n.encode(), answer.headers[n].encode()) for n in PASSED_BACK if n in answer.headers
            ]
            await begin(answer.status_code, back)
            parts = answer.aiter_bytes()
            while (part := await watched(anext(parts, None), lives)) is not None:
                await put(part)
        except (httpx.HTTPError, Gone) as error:
            raise broken() from error
        finally:
            await asyncio.shield(answer.aclose())
