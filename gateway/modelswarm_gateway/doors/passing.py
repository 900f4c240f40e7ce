"""Passes a request on to the gateway that holds its session, and its answer back as it comes (R20).

Used by the HTTP door. A request is passed on once: the mark on it says so, and whoever gets it so answers or refuses.
Knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import httpx

from modelswarm_gateway.errors import ApiError, Code

log = logging.getLogger(__name__)

MARK = "x-modelswarm-forwarded"
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 120.0  # a gateway that holds a stream says so every few seconds
PASSED_ON = ("authorization", "last-event-id")
PASSED_BACK = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")
MOST_CONNECTIONS = 4096


@dataclass(frozen=True, slots=True)
class Original:
    """The request as it came."""

    path: str
    headers: Mapping[str, str]
    body: object


Begin = Callable[[int, list[tuple[bytes, bytes]]], Awaitable[None]]
Put = Callable[[bytes], Awaitable[None]]


class Unreachable(Exception):
    """Nothing was said yet: another way may be tried."""


class Passing:
    def __init__(self) -> None:
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=MOST_CONNECTIONS),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def on(self, target: str, original: Original, begin: Begin, put: Put) -> None:
        """Raises Unreachable before anything was said, ApiError after."""
        headers = {n: original.headers[n] for n in PASSED_ON if n in original.headers}
        headers |= {"content-type": "application/json", MARK: "1"}
        request = self._client.build_request(
            "POST",
            f"http://{target}{original.path}",
            headers=headers,
            content=json.dumps(original.body).encode(),
        )
        try:
            answer = await self._client.send(request, stream=True)
        except (httpx.HTTPError, OSError) as error:
            raise Unreachable(f"{target}: {error!r}") from error
        try:
            back = [
                (n.encode(), answer.headers[n].encode()) for n in PASSED_BACK if n in answer.headers
            ]
            await begin(answer.status_code, back)
            async for part in answer.aiter_bytes():
                await put(part)
        except httpx.HTTPError as error:
            detail = "the gateway that holds this session is gone; go on with Last-Event-ID"
            raise ApiError(Code.STREAM_BROKEN, detail, param="session_id") from error
        finally:
            await asyncio.shield(answer.aclose())
