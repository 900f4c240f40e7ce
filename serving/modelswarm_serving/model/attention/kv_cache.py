"""The paged key and value store of one span: for each block one tensor of token slots.

Page p holds slots [p * page_size, (p + 1) * page_size). Which session owns a page is the server core's business; this
module only holds the memory. Filled and read by `attention.py`, and by `span.py` for copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvCacheShape:
    blocks: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int


class KvCache:
    """`blocks[i]`: [slots, 2, kv_heads, head_dim], keys and values of the span's i-th block side by side, so that one
    call writes or gathers both."""

    def __init__(self, shape: KvCacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        size = (shape.pages * shape.page_size, 2, shape.kv_heads, shape.head_dim)
        # Zeros, not empty: the memory is really there from the start, an admitted session cannot run out of it.
        self.blocks = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.blocks)]

    def read(self, pages: Sequence[int], first: int, count: int, blocks: slice) -> bytes:
        """KV of positions [first, first + count) in these blocks, counted in the span: [count, blocks, 2, kv_heads,
        head_dim]."""
        slots = self._slots(pages, first, count)
        stores = [store.index_select(0, slots) for store in self.blocks[blocks]]
        whole = torch.stack(stores, dim=1)
        return whole.view(torch.uint8).cpu().numpy().tobytes()

    def write(
        self, pages: Sequence[int], first: int, count: int, blocks: slice, kv: bytes | memoryview
    ) -> None:
        """Put what `read` gave, there or on another server, into these pages."""
        slots = self._slots(pages, first, count)
        stores = self.blocks[blocks]
        flat = torch.frombuffer(bytearray(kv), dtype=self.dtype).to(self.device)
        whole = flat.view(count, len(stores), *stores[0].shape[1:])
        for index, store in enumerate(stores):
            store.index_copy_(0, slots, whole[:, index])

    def _slots(self, pages: Sequence[int], first: int, count: int) -> torch.Tensor:
        size = self.shape.page_size
        slots = [pages[p // size] * size + p % size for p in range(first, first + count)]
        return torch.tensor(slots, device=self.device)

    @property
    def key_bytes(self) -> int:
        """Bytes of one position's keys in one block."""
        return self.shape.kv_heads * self.shape.head_dim * self.dtype.itemsize
