"""Paged attention by Triton kernels: pages are read in place, and decode steps can be captured in CUDA graphs.

The default on CUDA (`selection.py`). Launches `triton_kernels.py`. Prefill rows are tiles. Keys of decode rows are read
in several parts, so that few sequences keep all processors of the GPU busy. On a CPU the kernels run in Triton's
interpreter, for tests. Knows no sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from modelswarm_serving.model.attention.backend import Scoring
from modelswarm_serving.model.attention.backend_names import TRITON
from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.attention.static_decode import StaticDecode
from modelswarm_serving.model.attention.step_layout import RowLayout, StepLayout, TileBatch
from modelswarm_serving.model.attention.triton_kernels import attend_tiles, merge_parts

_MOST_PARTS = 32
"""Parts of the keys of one decode row, at most."""
_PART_KEYS = 128
"""Keys of a part, at least: below, the merge costs more than the part saves."""
_BLOCK_BYTES = 16 << 10
"""Bytes of the keys that a program holds at once. Two such blocks, and as many of values, fit in shared memory: a block
of threads has 99 KiB on SM86, SM89 and SM120."""
_SUM_BYTES = 32 << 10
"""Bytes of the float32 sums of a prefill tile: 64 registers of each of 128 threads."""
_LARGE_SHARED_BYTES = 160 << 10
"""Shared memory from which on a tile may have twice the sums: SM80, SM90 and SM100."""
_LEAST = 16
"""Least side of a matrix product in Triton."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The facts of a device that shape the launches."""

    programs: int  # that run at a time
    sum_bytes: int
    product: tl.dtype | None  # of the matrix products; None: that of the keys

    @classmethod
    def of(cls, device: torch.device) -> DeviceLimits:
        if device.type == "cpu":
            # The interpreter's product reads bfloat16 as integers.
            return cls(16, _SUM_BYTES, tl.float32)
        facts = torch.cuda.get_device_properties(device)
        shared = getattr(facts, "shared_memory_per_block_optin", 0)  # ROCm has none
        return cls.of_gpu(facts.multi_processor_count, shared)

    @classmethod
    def of_gpu(cls, processors: int, shared_bytes: int) -> DeviceLimits:
        """Return those of a GPU. `shared_bytes`: the most that one block of threads may have."""
        larger = 2 if shared_bytes >= _LARGE_SHARED_BYTES else 1
        return cls(2 * processors, larger * _SUM_BYTES, None)


class TritonBackend:
    """Paged attention of one KV cache. Not thread-safe: one step at a time."""

    name = TRITON

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._device = DeviceLimits.of(cache.device)
        self._static: StaticDecode | None = None

    def attend(self, layout: RowLayout, store: Tensor, query: Tensor, scoring: Scoring) -> Tensor:
        return self.attend_pages(layout, store[:, 0], store[:, -1], query, scoring)

    def attend_pages(
        self, layout: RowLayout, keys: Tensor, values: Tensor, query: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attend over keys [slots, kv_heads, D] and values [slots, kv_heads, E]; return [T, heads, E]."""
        if query.stride(2) != 1:
            query = query.contiguous()
        out = query.new_empty(len(query), query.shape[1], values.shape[2])
        launch = Launch(self._device, self._cache.shape.page_size, keys, values, query, scoring)
        for batch in layout.tile_batches(launch.tile_rows):
            launch.attend(batch, layout, out)
        return out

    def init_graphs(self, rows: int, positions: int) -> None:
        self._static = StaticDecode(self._cache, rows, positions)

    def prepare_for_capture(self, rows: int) -> RowLayout:
        assert self._static is not None
        return self._static.padding(rows)

    def prepare_for_replay(self, layout: StepLayout, rows: int) -> None:
        assert self._static is not None
        self._static.fill(layout, rows)


class Launch:
    """The launches of one block's attention call."""

    def __init__(
        self,
        device: DeviceLimits,
        page_size: int,
        keys: Tensor,
        values: Tensor,
        query: Tensor,
        scoring: Scoring,
    ) -> None:
        self._device, self._page_size = device, page_size
        self._keys, self._values, self._query, self._scoring = keys, values, query, scoring
        self._heads, self._kv_heads = query.shape[1], keys.shape[1]
        self._group = self._heads // self._kv_heads
        self._group_pad = _power_of_two(self._group)
        self._key_pad = max(_LEAST, _power_of_two(query.shape[2]))
        self._value_pad = max(_LEAST, _power_of_two(values.shape[2]))
        # Exact products of float32 have no tensor cores, and hold their operands in registers.
        is_exact = query.dtype == torch.float32
        lanes = 32 if is_exact else min(128, device.sum_bytes // (self._value_pad * 4))
        self._lanes = max(_LEAST, self._group_pad, lanes)
        self.tile_rows = self._lanes // self._group_pad

    def attend(self, batch: TileBatch, layout: RowLayout, out: Tensor) -> None:
        """Attend the rows of a batch of tiles and write them to `out`."""
        parts = self._part_count(len(batch.tiles), layout.max_position) if batch.is_decode else 1
        rows = len(batch.tiles) if parts > 1 else 0
        part_out = out.new_empty(rows, self._heads, parts, out.shape[2], dtype=torch.float32)
        part_weight = out.new_empty(rows, self._heads, parts, dtype=torch.float32)
        scoring = self._scoring
        attend_tiles[len(batch.tiles), self._kv_heads, parts](
            self._query,
            self._keys,
            self._values,
            out,
            part_out,
            part_weight,
            batch.tiles,
            batch.table,
            layout.positions,
            scoring.slopes,
            scoring.sinks,
            scoring.scaling,
            scoring.softcap or 1.0,
            scoring.window or 0,
            *self._query.stride()[:2],
            *self._keys.stride()[:2],
            *self._values.stride()[:2],
            *out.stride()[:2],
            batch.table.stride(0),
            **self.constants(batch.is_decode, parts),
            **self.options(batch.is_decode),
        )
        if parts > 1:
            merge_parts[rows, self._heads](
                part_out,
                part_weight,
                out,
                *out.stride()[:2],
                VALUE_SIZE=out.shape[2],
                VALUE_PAD=self._value_pad,
                SPLITS=parts,
                enable_fp_fusion=True,
            )

    def constants(self, is_decode: bool, parts: int) -> dict[str, Any]:
        """Return the constants for which the kernel is compiled."""
        scoring = self._scoring
        return {
            "GROUP": self._group,
            "GROUP_PAD": self._group_pad,
            "KEY_SIZE": self._query.shape[2],
            "KEY_PAD": self._key_pad,
            "VALUE_SIZE": self._values.shape[2],
            "VALUE_PAD": self._value_pad,
            "PAGE": self._page_size,
            "LANES": self._lane_count(is_decode),
            "BLOCK": self._block_keys(),
            "SPLITS": parts,
            "HAS_SOFTCAP": scoring.softcap is not None,
            "HAS_WINDOW": scoring.window is not None,
            "HAS_SLOPES": scoring.slopes is not None,
            "HAS_SINKS": scoring.sinks is not None,
            "PRODUCT": self._device.product or _DTYPES[self._query.dtype],
        }

    def options(self, is_decode: bool) -> dict[str, Any]:
        """Return the options of Triton's compiler."""
        widest = max(self._value_pad, self._block_keys())
        is_large = self._lane_count(is_decode) * widest * 4 > _SUM_BYTES
        return {
            "num_warps": 8 if is_large else 4,
            "num_stages": 2,
            "enable_fp_fusion": True,  # Triton's own default, of which it warns that it will change
        }

    def _lane_count(self, is_decode: bool) -> int:
        return max(_LEAST, self._group_pad) if is_decode else self._lanes

    def _block_keys(self) -> int:
        row_bytes = max(self._key_pad, self._value_pad) * self._query.element_size()
        return max(_LEAST, min(128, _BLOCK_BYTES // row_bytes))

    def _part_count(self, rows: int, max_position: int) -> int:
        """Return the parts of each decode row: enough to fill the device, and a power of two.

        The number depends on the longest context, not on the real ones: a captured launch serves all of them.
        """
        keys = min(max_position + 1, self._scoring.window or max_position + 1)
        wanted = self._device.programs // (rows * self._kv_heads)
        most = min(_MOST_PARTS, wanted, -(-keys // _PART_KEYS))
        return 1 << (max(1, most).bit_length() - 1)


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
