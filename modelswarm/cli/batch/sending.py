"""Sends one request of a batch until it has an answer.

A gateway that was killed returns, and a full swarm gets room. A broken connection, and an answer with
`x-should-retry`, are therefore tried again for a limited time. Then the last answer counts as it is.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

import httpx

from modelswarm.cli.batch.input_file import BatchRequest
from modelswarm.cli.batch.output_file import BatchAnswer
from modelswarm.client.api.connection import CONNECT_SECONDS, trusted_authorities
from modelswarm.client.api.errors import GatewayUnreachableError
from modelswarm.process.socket_options import keepalive_options

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 8.0
# A gateway whose machine vanished is noticed after about a minute, though a long answer is silent.
_KEEPALIVE = keepalive_options(idle_seconds=30)


@dataclass(frozen=True, slots=True)
class RequestTimeouts:
    """Timeouts of one request, in seconds, and the clock and the sleep that they are measured with."""

    answer: float  # from the request to the end of its answer
    retries: float  # from the first of several failures in a row to the last try
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class BatchSender:
    """Sends requests to the gateway at `base`; at most `concurrency` connections."""

    def __init__(self, base: str, model: str, concurrency: int, timeouts: RequestTimeouts) -> None:
        """`model`: that of requests that name none."""
        self._base, self._model, self._timeouts = base, model, timeouts
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._http = httpx.AsyncClient(
            base_url=base,
            timeout=httpx.Timeout(timeouts.answer, connect=CONNECT_SECONDS),
            transport=httpx.AsyncHTTPTransport(
                limits=limits,
                socket_options=_KEEPALIVE,
                verify=trusted_authorities(base),
                trust_env=False,
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def fetch_answer(self, request: BatchRequest) -> BatchAnswer:
        """Return the answer. GatewayUnreachableError if no gateway accepts connections for the time of retries."""
        clock, pause, deadline = self._timeouts.clock, FIRST_PAUSE_SECONDS, None
        content = json.dumps({"model": self._model} | request.body).encode()
        while True:
            tried = await self._try_once(request.url, content)
            if isinstance(tried, BatchAnswer):
                return tried
            deadline = deadline or clock() + self._timeouts.retries
            wait = max(pause, tried.retry_after) * random.uniform(1.0, 1.25)
            if clock() + wait > deadline:
                return tried.give_up()
            await self._timeouts.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _try_once(self, url: str, content: bytes) -> BatchAnswer | Failure:
        headers = {"content-type": "application/json"}
        try:
            response = await self._http.post(url, content=content, headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            message = f"no gateway answers at {self._base}"
            return Failure(None, GatewayUnreachableError(message, self._base), cause=error)
        except httpx.ReadTimeout:
            message = f"no answer within {self._timeouts.answer:g} s; --timeout SECONDS allows more"
            return _failed("timeout", message)
        except httpx.TransportError as error:
            message = f"the connection to the gateway broke before its answer: {error or type(error).__name__}"
            return Failure(_failed("connection_broken", message))
        try:
            body: Any = response.json()
        except ValueError:
            message = f"{self._base} answers {response.status_code}, but not as a gateway does"
            return Failure(_failed("not_a_gateway", message))
        headers_of = response.headers
        answer = BatchAnswer(response.status_code, headers_of.get("x-request-id", ""), body)
        if headers_of.get("x-should-retry") != "true":
            return answer
        return Failure(answer, retry_after=_seconds(headers_of.get("retry-after")))


@dataclass(frozen=True, slots=True)
class Failure:
    """A try that another one may make good. If none does, `answer` counts, or without one `error` is raised."""

    answer: BatchAnswer | None
    error: GatewayUnreachableError | None = None
    retry_after: float = 0.0  # seconds
    cause: Exception | None = None

    def give_up(self) -> BatchAnswer:
        """Return the answer that counts, or raise the error."""
        if self.answer is not None:
            return self.answer
        assert self.error is not None
        raise self.error from self.cause


def _failed(code: str, message: str) -> BatchAnswer:
    return BatchAnswer(error={"code": code, "message": message})


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:  # a date, which proxies may send
        return 0.0
