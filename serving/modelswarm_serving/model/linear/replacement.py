"""Puts measured weights in place of the projections of transformers' own blocks.

Used by `served_blocks.py` for families without a fused form, if their weights are large enough to be measured. Each
module is replaced before its layout changes, so that no weight exists twice. transformers multiplies experts itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from modelswarm_serving.model.linear.weight import Weight

_READ_DIRECTLY = frozenset({"kv_b_proj"})
"""Projections whose weights `own_attention.py` reads."""


class MeasuredLinear(nn.Module):
    """A projection [..., in] -> [..., out] whose weight has a layout."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        super().__init__()
        self._laid_out, self._bias = weight, bias

    @property
    def weight(self) -> Tensor:
        """The matrix [out, in]; BLOOM's `slow_but_exact` multiplies parts of it."""
        return self._laid_out.matrix()

    def forward(self, rows: Tensor) -> Tensor:
        product = self._laid_out.multiply(rows.reshape(-1, rows.shape[-1]), self._bias)
        return product.view(*rows.shape[:-1], -1)


def projections(layers: Any) -> list[tuple[nn.Module, str, Any]]:
    """Return the projections of the blocks that can be replaced: the module around each, its name there, and itself."""
    return [
        (parent, name, module)
        for layer in layers
        for parent in layer.modules()
        for name, module in parent.named_children()
        if isinstance(module, nn.Linear | Conv1D) and name not in _READ_DIRECTLY
    ]


def replace_projections(layers: Any) -> list[Weight]:
    """Replace all of them in place; return their weights."""
    weights = []
    for parent, name, module in projections(layers):
        matrix = module.weight.t() if isinstance(module, Conv1D) else module.weight
        weights.append(Weight(matrix.detach()))
        setattr(parent, name, MeasuredLinear(weights[-1], module.bias))
    return weights
