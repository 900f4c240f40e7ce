"""One step's layout: which rows of the packed batch belong to which sequence, and where their KV lies.

Built once per step from plain Work, so that no block has to look at Python lists again. `attention.py` asks for the
pieces of a window size; everything index-like is a tensor by then. Knows nothing of models or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.base import BatchItem

GATHER_LIMIT = 2 * 1024 * 1024
GATHER_LIMIT_EACH = 96 * 1024
"""Bytes of padded keys per block, in all and per sequence, up to which decode rows attend as one gathered batch; above
they attend one by one, mostly on views. Measured with 2, 8 and 32 sequences of 64 to 1024 positions (AVX-512 Xeon):
the two cost the same near these limits, and one by one is up to twice as fast beyond."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that attend in one call: `n` sequences of `count` rows each, over `length` keys each."""

    start: int  # rows [start, start + n * count) of the batch
    sequences: int
    rows_each: int
    n_keys: int
    slots: slice | Tensor  # n * length slots; a slice is read without a copy
    mask: Tensor | None  # added to the scores, [n, 1, count, length]; None: every key counts
    causal: bool = False  # rows start at key 0: the plain triangle


class StepLayout:
    """Packed rows of one step; single rows first, so that decode is one run of rows."""

    def __init__(self, items: Sequence[BatchItem], cache: KvCache) -> None:
        self._cache = cache
        self._device = cache.device
        self.items = sorted(items, key=lambda work: work.count > 1)
        self.starts = list(accumulate((work.count for work in self.items), initial=0))
        self.rows = self.starts.pop()
        self.max_position = max(work.first + work.count for work in items) - 1  # position
        positions = [p for w in self.items for p in range(w.first, w.first + w.count)]
        self.positions = torch.tensor(positions, device=self._device)
        size = cache.shape.page_size
        self.slots = torch.tensor(
            [
                w.pages[p // size] * size + p % size
                for w in self.items
                for p in range(w.first, w.first + w.count)
            ],
            device=self._device,
        )
        self._groups: dict[int | None, list[AttentionGroup]] = {}

    def attention_groups(self, window: int | None) -> list[AttentionGroup]:
        """How the rows attend in blocks with this sliding window (None: full attention)."""
        if window not in self._groups:
            singles = sum(work.count == 1 for work in self.items)
            chunks = zip(self.items[singles:], self.starts[singles:], strict=True)
            groups = self._decode_groups(self.items[:singles], window)
            self._groups[window] = groups + [
                self._prefill_group(w, row, window) for w, row in chunks
            ]
        return self._groups[window]

    def _decode_groups(
        self, items: Sequence[BatchItem], window: int | None
    ) -> list[AttentionGroup]:
        """Works of one row each, which are the batch's first rows."""
        lengths = [_visible_keys(work.first + 1, window) for work in items]
        n, longest = len(items), max(lengths, default=0)
        limit = min(GATHER_LIMIT, n * GATHER_LIMIT_EACH)
        if n > 1 and n * longest * self._cache.key_bytes <= limit:
            return [self._gathered_group(items, lengths, longest)]
        return [
            AttentionGroup(
                row, 1, 1, length, self._slots_before(work, work.first + 1, length), None
            )
            for row, (work, length) in enumerate(zip(items, lengths, strict=True))
        ]

    def _gathered_group(
        self, items: Sequence[BatchItem], lengths: list[int], longest: int
    ) -> AttentionGroup:
        """One padded batch; where a sequence is shorter, its newest slot is read again and masked."""
        size = self._cache.shape.page_size
        used = max(work.first for work in items) // size + 1
        table = self._tensor([_padded(work.pages, used) for work in items])
        newest = self._tensor([[work.first] for work in items])
        seen = self._tensor([[length] for length in lengths])
        column = torch.arange(longest, device=self._device)
        position = torch.minimum(newest - seen + 1 + column, newest)
        where = table.gather(1, position // size) * size + position % size
        mask = torch.zeros(where.shape, dtype=self._cache.dtype, device=self._device)
        mask.masked_fill_(column >= seen, float("-inf"))
        return AttentionGroup(0, len(items), 1, longest, where.view(-1), mask[:, None, None])

    def _prefill_group(self, item: BatchItem, row: int, window: int | None) -> AttentionGroup:
        """Prefill rows of one sequence: each sees the keys up to itself, at most `window` of them."""
        count, end = item.count, item.first + item.count
        length = _visible_keys(end, None if window is None else window + count - 1)
        where = self._slots_before(item, end, length)
        if length == count and (window is None or count <= window):
            return AttentionGroup(row, 1, count, length, where, None, causal=True)
        queries = torch.arange(item.first, end, device=self._device)[:, None]
        keys = torch.arange(end - length, end, device=self._device)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._cache.dtype, device=self._device)
        mask.masked_fill_(hidden, float("-inf"))
        return AttentionGroup(row, 1, count, length, where, mask[None, None])

    def _slots_before(self, item: BatchItem, end: int, length: int) -> slice | Tensor:
        """Slots of positions [end - length, end); a slice when their pages are neighbours."""
        size = self._cache.shape.page_size
        low, high = (end - length) // size, (end - 1) // size
        skip = end - length - low * size
        pages = item.pages[low : high + 1]
        first = pages[0]
        if all(page == first + i for i, page in enumerate(pages)):
            return slice(first * size + skip, first * size + skip + length)
        slots = self._tensor(list(pages))[:, None] * size + torch.arange(size, device=self._device)
        return slots.view(-1)[skip : skip + length]

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, device=self._device)


def _visible_keys(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)


def _padded(pages: Sequence[int], count: int) -> list[int]:
    """The first `count` pages; what is missing is never read."""
    held = list(pages[:count])
    return held + [0] * (count - len(held))
