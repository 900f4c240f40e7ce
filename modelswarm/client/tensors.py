"""Rows of tensors as the bytes of a server's dtype, and calls for several rows side by side.

Used by the Hugging Face class, the engine's sessions and training. Knows no calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from modelswarm.client.sessions.connection import ServedModel

MAX_CALLS = 16
"""Rows that are asked for side by side; each has a call of its own."""

Result = TypeVar("Result")


def _dtype_of(served: ServedModel) -> torch.dtype:
    """Return the dtype of the model's rows."""
    found: torch.dtype = getattr(torch, served.dtype)
    return found


def pack_rows(rows: Tensor, served: ServedModel) -> bytes:
    """Return rows [..., hidden] as bytes."""
    given = rows.detach().to("cpu", _dtype_of(served)).contiguous()
    return given.view(torch.uint8).numpy().tobytes()


def unpack_rows(data: bytes, served: ServedModel) -> Tensor:
    """Return the rows [length, hidden] that the bytes are."""
    if not data:
        return torch.empty(0, served.hidden_size, dtype=_dtype_of(served))
    flat = torch.frombuffer(bytearray(data), dtype=_dtype_of(served))
    return flat.view(-1, served.hidden_size)


def side_by_side(
    run: Callable[..., Result], *arguments: Collection[Any], most: int = MAX_CALLS
) -> list[Result]:
    """Return the results of calls with the first of each argument, the second of each, and so on, in this order.

    At most `most` of them run at a time. A single one runs in this thread.
    """
    calls = list(zip(*arguments, strict=True))
    if len(calls) <= 1:
        return [run(*each) for each in calls]
    with ThreadPoolExecutor(min(most, len(calls))) as pool:
        return list(pool.map(lambda each: run(*each), calls))
