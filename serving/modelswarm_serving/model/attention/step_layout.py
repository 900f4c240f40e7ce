"""Layout of one packed step: the rows of each sequence and the slots of their KV (vLLM: attention metadata).

Built once per step from batch items, so that no block reads Python lists again. `attention.py` asks for the attention
groups of a window size, `triton_attention.py` for tiles of rows; all indices are tensors by then. Knows nothing of
models or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.attention.staging import to_device, to_index
from modelswarm_serving.model.base import BatchItem

GATHER_LIMIT = 2 * 1024 * 1024
GATHER_KEYS, GATHER_EACH = 256, 96 * 1024
"""Limits of a batch of decode rows that attend over gathered, padded keys. The first is for the bytes of its keys in
one block, the others are for the keys of a row or their bytes. Longer rows attend one by one. Measured on an AVX-512
EPYC with 4 and 8 rows of 32 to 4,000 keys. With 1 to 8 KB per position a batch is faster up to 300 keys, by 40 % at
32, and slower from 1,000 on. With fewer bytes it is faster up to 700 keys and more."""
GATHER_SPREAD, GATHER_SHORT = 2, 32
"""A batch has rows of up to so many times the keys of its shortest row, which counts as `GATHER_SHORT` at least. Beside
a row of 250 keys, the padding of three rows of 16 took more time than their own calls."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that attend in one call: `sequences` sequences of `rows_each` rows, each over `n_keys` keys."""

    start: int  # rows [start, start + sequences * rows_each) of the step
    sequences: int
    rows_each: int
    n_keys: int
    slots: slice | Tensor  # sequences * n_keys slots; a slice is read without a copy
    mask: (
        Tensor | None
    )  # added to the scores, [sequences, 1, rows_each, n_keys]; None: every key counts
    causal: bool = False  # rows start at key 0: the plain triangle


@dataclass(frozen=True, slots=True)
class TileBatch:
    """Rows that attend in one launch, in tiles of neighbouring rows of one sequence."""

    tiles: Tensor  # [n, 3], int32: sequence, first row, number of rows
    table: Tensor  # [sequences, pages], int32: pages of each sequence
    is_decode: bool  # each tile is one row, and tile i is row i of the step


class RowLayout(Protocol):
    """Rows of a step as blocks and backends see them: those of `StepLayout`, or static buffers for CUDA graphs."""

    @property
    def positions(self) -> Tensor:
        """[T], int64."""
        ...

    @property
    def slots(self) -> Tensor:
        """[T], int64."""
        ...

    @property
    def max_position(self) -> int:
        """No position is larger."""
        ...

    def pick_positions(self, table: Tensor) -> Tensor:
        """Return the rows of a table [positions, ...] at the positions of these rows, [T, ...]."""
        ...

    def tile_batches(self, rows_each: int) -> list[TileBatch]:
        """Return all rows as tiles of at most so many rows."""
        ...


class Blocks(Protocol):
    """The blocks of a span in one of their two forms, `FusedBlocks` or `GenericBlocks`."""

    def run(self, rows: Tensor, layout: RowLayout, start: int, end: int) -> Tensor: ...


class StepLayout:
    """Packed rows of one step; single rows first, so that decode is one run of rows, the shortest sequence first."""

    def __init__(self, items: Sequence[BatchItem], cache: KvCache) -> None:
        self._cache = cache
        self._device = cache.device
        self.items = sorted(items, key=_place_in_step)
        self.starts = list(accumulate((work.count for work in self.items), initial=0))
        self.rows = self.starts.pop()
        self.max_position = max(work.first + work.count for work in items) - 1  # position
        self.singles = sum(work.count == 1 for work in items)
        size = cache.shape.page_size
        self.position_list = [p for w in self.items for p in range(w.first, w.first + w.count)]
        self.slot_list = [
            w.pages[p // size] * size + p % size
            for w in self.items
            for p in range(w.first, w.first + w.count)
        ]
        self._groups: dict[int | None, list[AttentionGroup]] = {}
        self._tiles: dict[int, list[TileBatch]] = {}

    @cached_property
    def positions(self) -> Tensor:
        return self._tensor(self.position_list)

    @cached_property
    def slots(self) -> Tensor:
        return self._tensor(self.slot_list)

    def pick_positions(self, table: Tensor) -> Tensor:
        if self.rows == 1:  # a view: no positions are needed as a tensor
            return table.narrow(0, self.max_position, 1)
        return table.index_select(0, self.positions)

    def page_table(self) -> Tensor:
        """Return the pages of all sequences on the host, [sequences, pages in use], int32."""
        size = self._cache.shape.page_size
        used = [-(-(work.first + work.count) // size) for work in self.items]
        table = np.zeros((len(self.items), max(used)), dtype=np.int32)
        for row, (work, count) in enumerate(zip(self.items, used, strict=True)):
            table[row, :count] = work.pages[:count]
        return torch.from_numpy(table)

    def tile_batches(self, rows_each: int) -> list[TileBatch]:
        """Return decode rows and prefill rows as tiles, where there are any."""
        if rows_each not in self._tiles:
            table = to_device(self.page_table(), self._device)
            decode = [(row, row, 1) for row in range(self.singles)]
            prefill = [
                (index, start + done, min(rows_each, work.count - done))
                for index, (work, start) in enumerate(zip(self.items, self.starts, strict=True))
                if work.count > 1
                for done in range(0, work.count, rows_each)
            ]
            self._tiles[rows_each] = [
                TileBatch(self._tensor(tiles).int(), table, is_decode)
                for tiles, is_decode in ((decode, True), (prefill, False))
                if tiles
            ]
        return self._tiles[rows_each]

    def attention_groups(self, window: int | None) -> list[AttentionGroup]:
        """Return the groups in which the rows attend in blocks with this sliding window (None: full attention)."""
        if window not in self._groups:
            singles = self.singles
            chunks = zip(self.items[singles:], self.starts[singles:], strict=True)
            groups = self._decode_groups(self.items[:singles], window)
            self._groups[window] = groups + [
                self._prefill_group(w, row, window) for w, row in chunks
            ]
        return self._groups[window]

    def _decode_groups(
        self, items: Sequence[BatchItem], window: int | None
    ) -> list[AttentionGroup]:
        """Return the groups of items of one row each, which are the first rows of the step, in order of length."""
        lengths = [visible_keys(work.first + 1, window) for work in items]
        groups: list[AttentionGroup] = []
        start = 0
        while start < len(items):
            end = self._batch_end(lengths, start)
            if end - start > 1:
                groups.append(self._gathered_group(start, items[start:end], lengths[start:end]))
            else:
                work, length = items[start], lengths[start]
                slots = self._slots_before(work, work.first + 1, length)
                groups.append(AttentionGroup(start, 1, 1, length, slots, None))
            start = end
        return groups

    def _batch_end(self, lengths: Sequence[int], start: int) -> int:
        """Return the end of the batch of rows that begins at `start`; a batch of one row attends alone."""
        end = start + 1
        key_bytes = self._cache.key_bytes
        longest = min(
            max(GATHER_KEYS, GATHER_EACH // key_bytes),
            GATHER_SPREAD * max(GATHER_SHORT, lengths[start]),
        )
        padded = GATHER_LIMIT // key_bytes
        while end < len(lengths) and lengths[end] <= min(longest, padded // (end + 1 - start)):
            end += 1
        return end

    def _gathered_group(
        self, start: int, items: Sequence[BatchItem], lengths: Sequence[int]
    ) -> AttentionGroup:
        """Return one padded group; in a shorter sequence the newest slot is read again and masked."""
        size, longest = self._cache.shape.page_size, lengths[-1]
        used = max(work.first for work in items) // size + 1
        table = self._tensor([_padded(work.pages, used) for work in items])
        newest = self._tensor([[work.first] for work in items])
        seen = self._tensor([[length] for length in lengths])
        column = torch.arange(longest, device=self._device)
        position = torch.minimum(newest - seen + 1 + column, newest)
        where = table.gather(1, position // size) * size + position % size
        mask = torch.zeros(where.shape, dtype=self._cache.dtype, device=self._device)
        mask.masked_fill_(column >= seen, float("-inf"))
        return AttentionGroup(start, len(items), 1, longest, where.view(-1), mask[:, None, None])

    def _prefill_group(self, item: BatchItem, row: int, window: int | None) -> AttentionGroup:
        """Return the group of one sequence's prefill rows: each sees the keys up to itself, at most `window`."""
        count, end = item.count, item.first + item.count
        length = visible_keys(end, None if window is None else window + count - 1)
        where = self._slots_before(item, end, length)
        mask = prefill_mask(item.first, count, length, window, self._device, self._cache.dtype)
        return AttentionGroup(row, 1, count, length, where, mask, causal=mask is None)

    def _slots_before(self, item: BatchItem, end: int, length: int) -> slice | Tensor:
        """Return the slots of positions [end - length, end); a slice if their pages are neighbours."""
        size = self._cache.shape.page_size
        low, high = (end - length) // size, (end - 1) // size
        skip = end - length - low * size
        pages = item.pages[low : high + 1]
        first = pages[0]
        if all(page == first + i for i, page in enumerate(pages)):
            return slice(first * size + skip, first * size + skip + length)
        slots = self._tensor(list(pages))[:, None] * size + torch.arange(size, device=self._device)
        return slots.view(-1)[skip : skip + length]

    def _tensor(self, values: Sequence[int | Sequence[int]]) -> Tensor:
        return to_index(values, self._device)


def prefill_mask(
    first: int,
    count: int,
    length: int,
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return what is added to the scores of rows [first, first + count) over the last `length` keys up to them.

    None: the plain triangle.
    """
    end = first + count
    if length == count and (window is None or count <= window):
        return None
    queries = torch.arange(first, end, device=device)[:, None]
    keys = torch.arange(end - length, end, device=device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    mask.masked_fill_(hidden, float("-inf"))
    return mask[None, None]


def visible_keys(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)


def _place_in_step(item: BatchItem) -> tuple[bool, int]:
    return item.count > 1, item.first if item.count == 1 else 0


def _padded(pages: Sequence[int], count: int) -> list[int]:
    """Return the first `count` pages, padded with page 0, which is never read for them."""
    held = list(pages[:count])
    return held + [0] * (count - len(held))
