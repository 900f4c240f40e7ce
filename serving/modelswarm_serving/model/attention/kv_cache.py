"""The KV cache of one span: one tensor of token slots per block.

Page p holds slots [p * page_size, (p + 1) * page_size). Filled and read by `attention.py`, and by `span.py` for KV
transfers. Holds the memory only; the server core knows which session owns a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modelswarm_serving.model.attention.staging import to_device, to_host, to_index


@dataclass(frozen=True, slots=True)
class KvCacheShape:
    blocks: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    parts: int = 2  # keys and values; 1: one vector is both


class KvCache:
    """Keys and values of all blocks. `blocks[i]`, [slots, 2, kv_heads, head_dim], belongs to the span's i-th block.

    Keys and values lie side by side, so that one call writes or gathers both.
    """

    def __init__(self, shape: KvCacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        slots = (shape.pages + 1) * shape.page_size  # one page for padding
        size = (slots, shape.parts, shape.kv_heads, shape.head_dim)
        # On a CPU, the kernel gives memory when it is first written. The memory plan counts all of it from the start.
        self.blocks = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.blocks)]

    @property
    def padding_page(self) -> int:
        """Number of the page that no session owns: rows of padding write there."""
        return self.shape.pages

    def read_kv(self, pages: Sequence[int], first: int, count: int, blocks: slice) -> bytes:
        """Return the KV of positions [first, first + count) as [count, blocks, 2, kv_heads, head_dim].

        `blocks` counts from the span's first block.
        """
        slots = self._slots(pages, first, count)
        stores = [store.index_select(0, slots) for store in self.blocks[blocks]]
        whole = torch.stack(stores, dim=1)
        return to_host(whole.view(torch.uint8)).numpy().tobytes()

    def write_kv(
        self, pages: Sequence[int], first: int, count: int, blocks: slice, kv: bytes | memoryview
    ) -> None:
        """Write the output of `read_kv`, of this or of another server, into these pages."""
        slots = self._slots(pages, first, count)
        stores = self.blocks[blocks]
        flat = to_device(torch.frombuffer(bytearray(kv), dtype=self.dtype), self.device)
        whole = flat.view(count, len(stores), *stores[0].shape[1:])
        for index, store in enumerate(stores):
            store.index_copy_(0, slots, whole[:, index])

    def copy_kv(
        self,
        source: Sequence[int],
        pages: Sequence[int],
        first: int,
        count: int,
        blocks: slice,
    ) -> None:
        """Copy the KV of positions [first, first + count) from the pages `source` into `pages`."""
        old, new = self._slots(source, first, count), self._slots(pages, first, count)
        for store in self.blocks[blocks]:
            store.index_copy_(0, new, store.index_select(0, old))

    def clear(self, slots: int) -> None:
        """Write zeros into the first slots of all blocks."""
        for store in self.blocks:
            store[:slots] = 0

    def _slots(self, pages: Sequence[int], first: int, count: int) -> torch.Tensor:
        size = self.shape.page_size
        slots = [pages[p // size] * size + p % size for p in range(first, first + count)]
        return to_index(slots, self.device)

    @property
    def key_bytes(self) -> int:
        """Bytes of one position's keys in one block."""
        return self.shape.kv_heads * self.shape.head_dim * self.dtype.itemsize
