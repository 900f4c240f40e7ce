"""The layout of decode steps in static buffers: the same memory in every step, so that a CUDA graph can replay it.

One row per sequence. A step of fewer sequences than the captured one is filled up with padding: position 0 of a page
that no session owns (`KvCache.padding_page`). Used by `triton_attention.py`. Knows no graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.attention.staging import to_device
from modelswarm_serving.model.attention.step_layout import StepLayout, TileBatch


class StaticRows:
    """The static layout of steps of exactly so many sequences."""

    def __init__(self, index: Tensor, max_position: int, batch: TileBatch) -> None:
        self.positions, self.slots = index
        self.max_position = max_position
        self._batch = batch

    def tile_batches(self, rows_each: int) -> list[TileBatch]:
        return [self._batch]


class StaticDecode:
    """The static buffers: positions and slots of each batch size, and one page table for all of them."""

    def __init__(self, cache: KvCache, rows: int, positions: int) -> None:
        self._cache = cache
        self._max_position = positions - 1
        self._page = cache.padding_page
        self._slot = self._page * cache.shape.page_size
        device, width = cache.device, -(-positions // cache.shape.page_size)
        self._table = torch.full((rows, width), self._page, dtype=torch.int32, device=device)
        row = torch.arange(rows, dtype=torch.int32, device=device)
        self._tiles = torch.stack((row, row, torch.ones_like(row)), dim=1)
        self._indexes: dict[int, Tensor] = {}

    def padding(self, rows: int) -> StaticRows:
        """Return the layout of this batch size, with padding in all rows."""
        index = torch.zeros(2, rows, dtype=torch.int64, device=self._cache.device)
        index[1] = self._slot
        self._indexes[rows] = index
        self._table.fill_(self._page)
        batch = TileBatch(self._tiles[:rows], self._table[:rows], is_decode=True)
        return StaticRows(index, self._max_position, batch)

    def fill(self, layout: StepLayout, rows: int) -> None:
        """Copy a decode step into the layout of this batch size."""
        missing = rows - layout.rows
        index = [
            layout.position_list + [0] * missing,
            layout.slot_list + [self._slot] * missing,
        ]
        self._indexes[rows].copy_(to_device(torch.tensor(index), self._cache.device))
        table = layout.page_table(rows, self._page)
        self._table[:rows, : table.shape[1]] = to_device(table, self._cache.device)
