"""Requests to the processes of one model: small and large ones, each in its lane.

Used by `tokenizer.py`. Knows neither tokens nor templates.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from modelswarm_gateway.models.encode_pool import EncodePool
from modelswarm_gateway.models.model_process import LARGE, SMALL, Answer, ModelProcess, Request

# Bytes of a small request; those of a larger one may be the cause of its failure, so it closes no chats.
SMALL_REQUEST_BYTES = 64 << 10


class ModelRequests:
    def __init__(self, process: ModelProcess, places: asyncio.Semaphore | None) -> None:
        """`places`: for the large requests of all models."""
        self._process, self._large = process, EncodePool(places)
        self._thread = ThreadPoolExecutor(1, "small-requests")

    async def ask(self, request: Request, *, is_large: bool) -> Answer:
        """Return head and data of the answer. Raise BudgetError, ModelProcessError or TooManyTexts."""
        lane = LARGE if is_large else SMALL
        work = partial(self._process.ask, request, lane)
        if is_large:
            return await self._large.run(work, len(request.content))
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def ask_now(self, request: Request) -> Answer:
        """Return the answer of a small request; for a thread, which may wait."""
        return self._thread.submit(self._process.ask, request, SMALL).result()

    def close(self) -> None:
        """End the processes. Requests that run or wait get ModelProcessError."""
        self._process.close()
        self._thread.submit(self._process.close_connections)
