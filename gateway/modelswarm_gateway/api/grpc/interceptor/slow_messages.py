"""Bounds gRPC requests that arrive slowly: their number, and the time that each may take.

Used by the interceptor of the gRPC servers. gRPC keeps what came of a message, up to 16 MiB, and waits for the rest
without a deadline. A call whose request does not come also takes one of the calls that a port has. Knows no methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from modelswarm_gateway.errors import ApiError, Code, invalid_request

# Looks at each request, and seconds between two of them, before it counts as slow. Several, because a loop that
# stood still finds the requests of that time in the next passes.
LOOKS, LOOK_SECONDS = 10, 0.1
# Slow requests of a port at a time, of up to 16 MiB each.
MAX_SLOW = 32
# Seconds that a slow request may take, as a body over HTTP.
SLOW_SECONDS = 60.0

Request = TypeVar("Request")


class SlowMessages:
    def __init__(self) -> None:
        self._slow = 0

    async def read(self, requests: AsyncIterator[Request]) -> Request | None:
        """Return the next request of a call; None if there is none. Raise ApiError if it comes too slowly."""
        reading = asyncio.ensure_future(anext(requests, None))
        try:
            for _ in range(LOOKS):
                if (await asyncio.wait({reading}, timeout=LOOK_SECONDS))[0]:
                    return reading.result()
            return await self._read_slowly(reading)
        finally:
            reading.cancel()

    async def _read_slowly(self, reading: asyncio.Future[Request | None]) -> Request | None:
        if self._slow >= MAX_SLOW:
            detail = f"{MAX_SLOW} requests arrive slowly already; retry in 1 s"
            raise ApiError(Code.NO_CAPACITY, detail, retry_after=1.0)
        self._slow += 1
        try:
            done, _ = await asyncio.wait({reading}, timeout=SLOW_SECONDS)
        finally:
            self._slow -= 1
        if not done:
            raise invalid_request(None, f"the request did not arrive within {SLOW_SECONDS:g} s")
        return reading.result()
