"""Rotary angles by position, from the model's own rotary module, computed once per position and not once per step.

Used by `fusion.py`. All rotary types here depend on the position alone: `loading.check_config` refuses the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""cos and signed sin of the step's rows, each [T, 1, head_dim]: x cos + swap_halves(x) sin turns x."""


class Rotary:
    """Tables of cos and sin by position, filled by the model's own rotary module."""

    def __init__(self, module: Any, layer_types: list[str], dtype: torch.dtype) -> None:
        self._module = module
        self._per_type = hasattr(module, "layer_types")  # Gemma 3: one base per layer type
        self._types = sorted(set(layer_types))
        self._dtype = dtype
        self._tables: dict[str, Angles] = {}
        self._computed = 0

    def __call__(self, positions: Tensor, max_position: int) -> dict[str, Angles]:
        """Return the angles of these positions by layer type; `max_position` is their maximum."""
        if max_position >= self._computed:
            self._grow(max(256, 1 << (max_position + 1).bit_length()), positions.device)
        if not self._per_type:
            cos, sin = self._tables[""]
            angles = cos[positions], sin[positions]
            return dict.fromkeys(self._types, angles)
        return {kind: (cos[positions], sin[positions]) for kind, (cos, sin) in self._tables.items()}

    def _grow(self, length: int, device: torch.device) -> None:
        positions = torch.arange(length, device=device)[None]
        like = torch.zeros(1, dtype=self._dtype, device=device)
        for kind in self._types if self._per_type else [""]:
            extra = (kind,) if self._per_type else ()
            cos, sin = self._module(like, positions, *extra)
            half = sin.shape[-1] // 2
            signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
            self._tables[kind] = cos[0].unsqueeze(1), signed.unsqueeze(1)
        self._computed = length
