"""Counts the calls of the Inference service, and the requests of a session's stream, by model and HTTP status.

The gateway that the client asked counts a forwarded call, with the status that the client got. HTTP requests are
counted by their log (`api/http/request_log.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from grpc import aio

from modelswarm_gateway.errors import ApiError, Code, status_of
from modelswarm_gateway.metrics.counters import Metrics

Part = TypeVar("Part")


@contextmanager
def counted_request(metrics: Metrics, model: Callable[[], str]) -> Iterator[None]:
    """Count a request when the block ends: by its ApiError, as 499 if it is cancelled, else as 500 or 200.

    A call that was aborted inside the block is counted already, by the interceptor.
    """
    try:
        yield
    except aio.AbortError:
        raise
    except BaseException as error:
        metrics.count_request(model(), status_of(_code_of(error)))
        raise
    metrics.count_request(model(), status_of(None))


def _code_of(error: BaseException) -> Code:
    if isinstance(error, ApiError):
        return error.code
    is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return Code.CANCELLED if is_cancelled else Code.INTERNAL


async def counted_parts(
    metrics: Metrics, model: Callable[[], str], parts: AsyncGenerator[Part, None]
) -> AsyncGenerator[Part, None]:
    """Yield the parts of the answer to one request, and count the request at their end."""
    with counted_request(metrics, model):
        async with aclosing(parts) as each:
            async for part in each:
                yield part
