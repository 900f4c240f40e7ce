"""Spans of a model, from the document and the number of blocks.

Used by `plan.py`, for `modelswarm up` and `modelswarm plan`. Knows nothing of servers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from modelswarm.errors import UserError
from modelswarm.placement.quantity import human_bytes, limit_at_least
from modelswarm.resources.spec import MAX_SPANS


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
    return tuple(_even_span(n_blocks, count, index) for index in range(count))


def smallest_spans(n_blocks: int) -> tuple[Span, ...]:
    """Return as many spans as a model may have."""
    return even_spans(n_blocks, min(n_blocks, MAX_SPANS))


def _even_span(n_blocks: int, count: int, index: int) -> Span:
    size, larger = divmod(n_blocks, count)
    first = index * size + min(index, larger)
    return Span(first, first + size + (index < larger))


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
    n_blocks: int,
    needed: Callable[[Span], int],
    available: int | None,
    field: str = "spec.spans",
) -> tuple[Span, ...]:
    """Return as few even spans as the memory of a server allows: `needed(span)` <= `available` bytes for each.

    Without a limit that is one span. UserError of `field` if even the smallest spans are too large. A bisection finds
    the number: `needed` grows with the blocks of a span. Where groups of large and small blocks take turns, it may find
    more spans.
    """
    if available is None:
        return even_spans(n_blocks, 1)

    def largest(count: int) -> int:
        return max(map(needed, even_spans(n_blocks, count)))

    most = len(smallest_spans(n_blocks))
    count = 1 + bisect_left(range(1, most + 1), True, key=lambda count: largest(count) <= available)
    if count <= most:
        return even_spans(n_blocks, count)
    least = largest(most)
    raise UserError(
        field,
        f"a server of one of {most} spans still needs {human_bytes(least)} of memory, but has "
        f"{human_bytes(available)}; allowed: at least {limit_at_least(least)}, or smaller sessions",
    )
