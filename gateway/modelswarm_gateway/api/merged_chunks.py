"""Reads the answers to one prompt (`n` above 1) side by side. Used by both APIs. Knows no API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from modelswarm_gateway.generation.generation import Generation
from modelswarm_gateway.generation.output.turn_output import OutputChunk


async def merge_chunks(
    generations: Sequence[Generation], keepalive: float
) -> AsyncGenerator[tuple[int, OutputChunk] | None]:
    """Yield the chunks of all answers as they come, None after `keepalive` seconds without one.

    Raise the ApiError of the first answer that fails. The first chunks come when every answer has begun, so that a
    family is refused as a whole (R12, admission).
    """

    def read(index: int) -> asyncio.Task[OutputChunk | None]:
        return asyncio.create_task(generations[index].next_chunk(keepalive))

    reads = {read(index): index for index in range(len(generations))}
    try:
        # Without this, a refusal of the first answer would wait for the others, which wait for it.
        await asyncio.wait(reads, return_when=asyncio.FIRST_EXCEPTION)
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=reads.__getitem__):
                index, chunk = reads.pop(task), task.result()
                yield None if chunk is None else (index, chunk)
                if chunk is None or chunk.finish is None:
                    reads[read(index)] = index
    finally:
        for task in reads:
            task.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
