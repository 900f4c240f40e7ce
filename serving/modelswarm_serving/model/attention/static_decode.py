"""The layout of decode steps in static buffers: the same memory in every step, so that a CUDA graph can replay it.

One row per sequence. A step of fewer sequences than the captured one is filled up with padding: position 0 of a page
that no session owns (`KvCache.padding_page`). Pages of a sequence seldom change between steps, so its row of the page
table stays on the device. Used by `triton_attention.py`. Knows no graphs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.attention.staging import to_device, to_index
from modelswarm_serving.model.attention.step_layout import StepLayout, TileBatch


class StaticRows:
    """The static layout of steps of exactly so many sequences."""

    def __init__(self, index: Tensor, max_position: int, batch: TileBatch) -> None:
        self.positions, self.slots = index
        self.max_position = max_position
        self._batch = batch

    def pick_positions(self, table: Tensor) -> Tensor:
        return table.index_select(0, self.positions)

    def tile_batches(self, rows_each: int) -> list[TileBatch]:
        return [self._batch]


class PageTable:
    """The pages of sequences on the device; only those that changed are copied.

    Row 0 is padding. Sequences are recognised by the list of their pages, and each step compares its content. So a list
    that changed, or another one in its place, is copied again. Steps take turns in groups of sequences, so there are
    more rows than one step has.
    """

    def __init__(self, cache: KvCache, rows: int, width: int) -> None:
        self._page_size, self._device = cache.shape.page_size, cache.device
        size = (1 + rows, width)
        self.tensor = torch.full(size, cache.padding_page, dtype=torch.int32, device=cache.device)
        self._capacity = rows
        self._rows: dict[int, int] = {}  # identity of a list of pages -> its row
        self._known: list[list[int]] = []  # pages in each row from 1 on

    def place(self, layout: StepLayout) -> list[int]:
        """Return the row of each sequence of a decode step, and copy what changed."""
        if len(self._rows) + layout.rows > self._capacity:
            self._rows, self._known = {}, []
        placed: list[int] = []
        changed: dict[int, list[int]] = {}
        for work in layout.items:
            row = self._rows.setdefault(id(work.pages), 1 + len(self._known))
            if row > len(self._known):
                self._known.append([])
            pages = list(work.pages[: work.first // self._page_size + 1])
            if self._known[row - 1][: len(pages)] != pages:
                changed[row] = pages
            placed.append(row)
        if changed:
            self._copy(changed)
        for row, pages in changed.items():  # after the copy, which may find no memory
            self._known[row - 1] = pages
        return placed

    def _copy(self, changed: dict[int, list[int]]) -> None:
        width = max(map(len, changed.values()))
        table = np.zeros((len(changed), width), dtype=np.int32)
        for line, pages in zip(table, changed.values(), strict=True):
            line[: len(pages)] = pages
        index = to_index(list(changed), self._device)
        lines = to_device(torch.from_numpy(table), self._device)
        self.tensor[:, :width].index_copy_(0, index, lines)


_GROUPS = 4
"""Full steps whose sequences the page table holds."""


class StaticDecode:
    """The static buffers: positions and slots of each batch size, and one page table for all of them."""

    def __init__(self, cache: KvCache, rows: int, positions: int) -> None:
        self._cache = cache
        self._max_position = positions - 1
        self._slot = cache.padding_page * cache.shape.page_size
        width = -(-positions // cache.shape.page_size)
        self._pages = PageTable(cache, _GROUPS * rows, width)
        row = torch.arange(rows, dtype=torch.int32, device=cache.device)
        self._tiles = torch.stack((torch.zeros_like(row), row, torch.ones_like(row)), dim=1)
        self._indexes: dict[int, Tensor] = {}

    def padding(self, rows: int) -> StaticRows:
        """Return the layout of this batch size, with padding in all rows."""
        index = torch.zeros(2, rows, dtype=torch.int64, device=self._cache.device)
        index[1] = self._slot
        self._indexes[rows] = index
        self._tiles[:, 0] = 0
        batch = TileBatch(self._tiles[:rows], self._pages.tensor, is_decode=True)
        return StaticRows(index, self._max_position, batch)

    def fill(self, layout: StepLayout, rows: int) -> None:
        """Copy a decode step into the layout of this batch size."""
        missing = rows - layout.rows
        numbers = [
            layout.position_list + [0] * missing,
            layout.slot_list + [self._slot] * missing,
            self._pages.place(layout) + [0] * missing,
        ]
        index = to_index(numbers, self._cache.device)
        self._indexes[rows].copy_(index[:2])
        self._tiles[:rows, 0] = index[2]
