"""Spans of a model, from the document and the number of blocks.

Used by `plan.py`, for `modelswarm up` and `modelswarm plan`. Knows nothing of servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from modelswarm.errors import UserError
from modelswarm.placement.quantity import human_bytes, limit_at_least


class Span(NamedTuple):
    """Blocks [first, last)."""

    first: int
    last: int

    @property
    def blocks(self) -> int:
        return self.last - self.first

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def format_blocks(blocks: Iterable[int]) -> str:
    """Return ascending block numbers as spans: `[0, 1, 2, 5]` as `0:3, 5:6`."""
    spans: list[Span] = []
    for block in blocks:
        if spans and spans[-1].last == block:
            spans[-1] = Span(spans[-1].first, block + 1)
        else:
            spans.append(Span(block, block + 1))
    return ", ".join(map(str, spans))


def even_spans(n_blocks: int, count: int) -> tuple[Span, ...]:
    """Return `count` spans whose sizes differ by at most one; larger ones first, as the last one also has the head."""
    if not 1 <= count <= n_blocks:
        raise UserError(
            "spec.spans.count",
            f"{count} is not allowed for a model of {n_blocks} blocks; allowed: 1 to {n_blocks}",
        )
    size, larger = divmod(n_blocks, count)
    bounds = [index * size + min(index, larger) for index in range(count + 1)]
    return tuple(Span(first, last) for first, last in pairwise(bounds))


def given_spans(n_blocks: int, ranges: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
    """Return the ranges of the document; UserError unless they cover exactly the model's blocks."""
    expected = 0
    for index, (first, last) in enumerate(ranges):
        if first != expected or last <= first:
            raise UserError(
                f"spec.spans.ranges[{index}]",
                f"first: {first}, last: {last} does not follow block {expected}; "
                f"allowed: first: {expected} and a greater last",
            )
        expected = last
    if expected != n_blocks:
        raise UserError(
            "spec.spans.ranges",
            f"they end at block {expected}, but the model has {n_blocks} blocks; "
            f"allowed: a last range that ends at {n_blocks}",
        )
    return tuple(Span(first, last) for first, last in ranges)


def automatic_spans(
    n_blocks: int, needed: Callable[[Span], int], available: int | None
) -> tuple[Span, ...]:
    """Return as few even spans as the memory of a server allows: `needed(span)` <= `available` bytes for each.

    Without a limit that is one span. UserError if even single blocks are too large.
    """
    if available is None:
        return even_spans(n_blocks, 1)
    for count in range(1, n_blocks + 1):
        spans = even_spans(n_blocks, count)
        if all(needed(span) <= available for span in spans):
            return spans
    largest = max(needed(span) for span in even_spans(n_blocks, n_blocks))
    raise UserError(
        "spec.spans",
        f"one block per server still needs {human_bytes(largest)} of memory, but a server has "
        f"{human_bytes(available)}; allowed: at least {limit_at_least(largest)}, or smaller sessions",
    )
