"""Reads weights in MXFP4 as those of the model's format: two numbers of four bits per byte, a scale per 32 of them.

`loading.py` puts an `Mxfp4Slice` in the place of the two stored tensors. Format: OCP Microscaling, E2M1 and E8M0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelswarm.checkpoint.block_tensors import PACKED, SCALES

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


class Mxfp4Slice:
    """A lazy slice [experts, in, out] of blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32]."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def __getitem__(self, index: Any) -> Tensor:
        return unpack_mxfp4(self._blocks[...], self._scales[...])[index]

    def get_shape(self) -> list[int]:
        experts, rows, groups, half = self._blocks.get_shape()
        return [experts, groups * half * 2, rows]

    def get_dtype(self) -> str:
        return "BF16"


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights in bfloat16, [experts, in, out]; one expert at a time, as the tables of all are large."""
    values = torch.tensor((*_VALUES, *(-each for each in _VALUES)), dtype=torch.bfloat16)
    experts, rows, groups, half = blocks.shape
    out = torch.empty(experts, groups * half * 2, rows, dtype=torch.bfloat16)
    for expert in range(experts):
        packed = blocks[expert].to(torch.int32)
        pairs = torch.stack((values[packed & 15], values[packed >> 4]), dim=-1)
        exponents = scales[expert].to(torch.int32)[..., None, None] - _SCALE_BIAS
        out[expert] = torch.ldexp(pairs, exponents).view(rows, -1).t()
    return out


def with_unpacked(slices: dict[str, Any]) -> dict[str, Any]:
    """Return the slices with one slice in the place of each pair of blocks and scales."""
    found = {name: each for name, each in slices.items() if not name.endswith((PACKED, SCALES))}
    for name, blocks in slices.items():
        if name.endswith(PACKED):
            whole = name.removesuffix(PACKED)
            found[whole] = Mxfp4Slice(blocks, slices[whole + SCALES])
    return found
