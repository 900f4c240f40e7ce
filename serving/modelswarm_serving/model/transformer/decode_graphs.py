"""Decode steps in static buffers, replayed as CUDA graphs: one launch for all blocks instead of some twenty per block.

A step with one row per sequence is filled up with padding to the next captured batch size. Nothing in a captured step
depends on values of the host: real positions, slots and pages are in device memory. On a CPU the same padded steps run
without graphs, for tests. Used by `span.py`; the attention backend owns its own static buffers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modelswarm_serving.model.attention.attention import attention_context
from modelswarm_serving.model.attention.backend import CapturableBackend
from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.attention.step_layout import RowLayout, StepLayout
from modelswarm_serving.model.transformer.fusion import FusedBlocks

_SMALL = (1, 2, 4, 8)
_STEP = 16
"""Distance of the batch sizes after the small ones, so that padding stays below a third of larger batches."""


def batch_sizes(most: int) -> list[int]:
    """Return the batch sizes to capture for at most so many sequences: 1, 2, 4, 8, 16, 32, 48 and so on."""
    sizes = [*_SMALL, *range(_STEP, most + _STEP, _STEP)]
    return sizes[: bisect_left(sizes, most) + 1]


class DecodeGraphs:
    """Captured decode steps of a whole span."""

    @torch.inference_mode()
    def __init__(
        self,
        blocks: FusedBlocks,
        cache: KvCache,
        backend: CapturableBackend,
        hidden: int,
        positions: int,
        most_rows: int,
    ) -> None:
        """Capture all batch sizes, the largest first, so that the others fit into its memory."""
        self.positions = positions
        self._blocks, self._cache, self._backend = blocks, cache, backend
        self._sizes = batch_sizes(most_rows)
        largest = self._sizes[-1]
        self._rows = torch.zeros(largest, hidden, dtype=cache.dtype, device=cache.device)
        self._output = torch.zeros_like(self._rows)
        backend.init_graphs(largest, positions)
        self._pool: Any = None  # of the graphs' memory; shared, as one of them runs at a time
        self._steps: dict[int, Callable[[], None]] = {}
        for size in reversed(self._sizes):
            step = partial(self._run_padded, backend.prepare_for_capture(size), size)
            self._steps[size] = self._capture(step)

    def can_run(self, layout: StepLayout) -> bool:
        """Return whether this is a step of one row per sequence, and not of too many."""
        return layout.singles == layout.rows <= self._sizes[-1]

    def run(self, rows: Tensor, layout: StepLayout) -> Tensor:
        """Run rows [T, hidden] through all blocks; the result is valid until the next step."""
        size = self._sizes[bisect_left(self._sizes, layout.rows)]
        self._rows[: layout.rows] = rows
        self._backend.prepare_for_replay(layout, size)
        self._steps[size]()
        return self._output[: layout.rows]

    def _run_padded(self, layout: RowLayout, size: int) -> None:
        with attention_context(layout, self._cache, backend=self._backend):
            rows = self._blocks.run(self._rows[:size], layout, 0, self._cache.shape.blocks)
        self._output[:size] = rows

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return the replay of a step, or the step itself where there are no CUDA graphs."""
        step()  # compiles kernels and fills the tables of angles, which a capture must not do
        if self._cache.device.type != "cuda":
            return step
        torch.cuda.synchronize(self._cache.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        self._pool = self._pool or graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay
