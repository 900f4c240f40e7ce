"""Rotary angles by position, from the model's own rotary module, computed once per position and not once per step.

Used by `fusion.py`. All rotary types here depend on the position alone: `loading.check_config` refuses the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelswarm_serving.model.attention.step_layout import RowLayout

Angles = tuple[Tensor, Tensor]
"""cos and signed sin of the step's rows, each [T, 1, head_dim]: x cos + swap_halves(x) sin turns x."""


_LEAST = 256
"""Positions of the first table."""
_AT_ONCE = 4096
"""Positions that the model's module computes at once, as it needs several tables of its own in float32."""


class Rotary:
    """Tables of cos and sin by position, filled by the model's own rotary module."""

    def __init__(self, module: Any, layer_types: list[str], dtype: torch.dtype) -> None:
        self._module = module
        self._per_type = hasattr(module, "layer_types")  # Gemma 3: one base per layer type
        self._types = sorted(set(layer_types))
        self._dtype = dtype
        self._tables: dict[str, Angles] = {}
        self._computed = 0

    def __call__(self, layout: RowLayout) -> dict[str, Angles]:
        """Return the angles of the rows by layer type."""
        if layout.max_position >= self._computed:
            length = max(_LEAST, 1 << layout.max_position.bit_length())
            self._grow(length, layout.positions.device)
        pick = layout.pick_positions
        found = {kind: (pick(cos), pick(sin)) for kind, (cos, sin) in self._tables.items()}
        return found if self._per_type else dict.fromkeys(self._types, found[""])

    def _grow(self, length: int, device: torch.device) -> None:
        for kind in self._types if self._per_type else [""]:
            self._tables[kind] = self._make_table(kind, length, device)
        self._computed = length

    def _make_table(self, kind: str, length: int, device: torch.device) -> Angles:
        extra = (kind,) if self._per_type else ()
        like = torch.zeros(1, dtype=self._dtype, device=device)
        table: Angles | None = None
        for start in range(0, length, _AT_ONCE):
            positions = torch.arange(start, min(start + _AT_ONCE, length), device=device)
            cos, sin = self._module(like, positions[None], *extra)
            size = sin.shape[-1]
            if table is None:
                table = cos.new_empty(length, 1, size), sin.new_empty(length, 1, size)
            table[0][positions, 0] = cos[0]
            table[1][positions, 0] = torch.cat(
                (-sin[0, :, : size // 2], sin[0, :, size // 2 :]), dim=-1
            )
        assert table is not None
        return table
