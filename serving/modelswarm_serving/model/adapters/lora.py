"""Adds LoRA adapters to rows: a projection's output gets (x A) B of the adapter of its row's session.

The projections do not know the rows of a step. They ask here, as attention does (`attention/attention.py`): the groups
of the step in progress on this thread say which rows have which adapter. Rows without one are not touched, so they are
those of a server without adapters, bit for bit. Used by `fused_block.py` and, by hooks, by transformers' own modules.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Place: TypeAlias = tuple[int, str]
"""A projection: its block, counted from the span's first, and its name there."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The numbers that an adapter adds to some outputs of a projection."""

    a: Tensor  # [in, rank]
    b: Tensor  # [rank, out], times the scale
    start: int  # its first output within the projection


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """An adapter in the blocks of a span."""

    deltas: Mapping[Place, Sequence[Delta]]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step that have the same adapter."""

    weights: LoraWeights
    rows: Tensor | None  # their places, int64; None: all rows


class _Context(threading.local):
    """The step in progress on this thread."""

    groups: Sequence[AdapterRows] = ()
    row_count: int = 0
    used: set[Place] | None = None  # recorded for the self-check


_context = _Context()


@contextmanager
def adapter_context(
    groups: Sequence[AdapterRows], row_count: int, used: set[Place] | None = None
) -> Iterator[None]:
    """Let all projections inside add these adapters to their rows; record the places that asked in `used`."""
    _context.groups, _context.row_count, _context.used = groups, row_count, used
    try:
        yield
    finally:
        _context.groups, _context.used = (), None


def add_adapters(output: Tensor, rows: Tensor, place: Place) -> Tensor:
    """Add to `output` [T, out], in place, what the adapters of the step make of `rows` [T, in]; return it."""
    if not _context.groups:
        return output
    if len(rows) != _context.row_count:
        raise RuntimeError(f"{place} runs {len(rows)} of {_context.row_count} rows: no adapters")
    if _context.used is not None:
        _context.used.add(place)
    for group in _context.groups:
        deltas = group.weights.deltas.get(place, ())
        if not deltas:
            continue
        own = rows if group.rows is None else rows.index_select(0, group.rows)
        for delta in deltas:
            change = (own @ delta.a) @ delta.b
            columns = output.narrow(1, delta.start, change.shape[1])
            if group.rows is None:
                columns.add_(change)
            else:
                columns.index_add_(0, group.rows, change)
    return output
