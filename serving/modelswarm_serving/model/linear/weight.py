"""A weight matrix in one of three layouts, and its product with rows.

A matrix exists once, in the layout that `layout_choice.py` measured as the fastest on this machine. Each layout has its
own product: torch's (MKL on x86) for the transposed one, oneDNN's for the others if it has one for the dtype. Measured
on an AVX-512 EPYC with `avx512_bf16` (one thread, 1024 -> 5632, weights colder than the cache), ms per product:

    rows                            1     2     4     8    32
    float32   torch's Linear     1.62  3.92  3.61  4.04  7.39
              transposed         1.34  2.69  2.98  3.53  6.46
              plain, oneDNN      1.54  1.98  2.18  2.60  5.14
              packed, oneDNN     1.82  2.14  1.43  1.90  4.21
    bfloat16  torch's Linear     0.98  1.25  1.45  1.60  2.82
              transposed         1.13  1.55  1.67  1.86  3.08
              packed, oneDNN     0.82  1.03  0.74  0.97  2.09

On an AVX-512 Xeon the transposed layout was fastest up to two rows, and packed float32 from four rows on. Layouts
differ in the last bits of their products, so the layout is a part of the numerics class.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modelswarm_serving.model.linear.layouts import WeightLayout


class Weight:
    """A matrix that multiplies rows [T, in] to [T, out]."""

    def __init__(self, matrix: Tensor, *, is_shared: bool = False) -> None:
        """`matrix`: [out, in]. `is_shared`: another module has the same memory, so it is never copied."""
        self._data = matrix if matrix.is_contiguous() or is_shared else matrix.contiguous()
        self._is_shared = is_shared
        self.layout = WeightLayout.PLAIN

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._data.numel()

    @property
    def inputs(self) -> int:
        return self._data.shape[0 if self.layout is WeightLayout.TRANSPOSED else 1]

    def matrix(self) -> Tensor:
        """Return [out, in]: a view, or a copy if it is packed."""
        if self.layout is WeightLayout.PACKED:
            return self._data.to_dense()
        return self._data.t() if self.layout is WeightLayout.TRANSPOSED else self._data

    def lay_out(self, layout: WeightLayout) -> None:
        """Change the layout; both exist until it returns. A shared matrix is never packed, it becomes plain."""
        if self._is_shared and layout is WeightLayout.PACKED:
            layout = WeightLayout.PLAIN
        if layout is self.layout:
            return
        matrix = self.matrix()
        if layout is WeightLayout.PACKED:
            self._data = torch.ops.mkldnn._reorder_linear_weight(matrix)
        elif layout is WeightLayout.PLAIN:
            self._data = matrix.contiguous()
        else:
            self._data = matrix.t() if self._is_shared else matrix.t().contiguous()
        self.layout = layout

    def multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the rows times the matrix, plus `bias` [out]; a gradient reaches the rows."""
        if self.layout is WeightLayout.TRANSPOSED:
            return rows @ self._data if bias is None else torch.addmm(bias, rows, self._data)
        by_onednn = self.layout is WeightLayout.PACKED or has_onednn(rows.dtype)
        if by_onednn and not torch.is_grad_enabled():
            return _linear(rows, self._data, bias)
        if self.layout is WeightLayout.PLAIN:
            return F.linear(rows, self._data, bias)
        product: Tensor = _PackedProduct.apply(rows, self)
        return product if bias is None else product + bias

    def multiply_onto(self, base: Tensor, rows: Tensor) -> Tensor:
        """Return base [T, out] plus the rows times the matrix."""
        if self.layout is WeightLayout.TRANSPOSED:
            return torch.addmm(base, rows, self._data)
        product = self.multiply(rows)
        return product + base if torch.is_grad_enabled() else product.add_(base)


class _PackedProduct(torch.autograd.Function):
    """The product with a packed matrix, of which torch knows no derivative."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return _linear(rows, weight._data, None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.weight.matrix(), None


def usable_layouts(dtype: torch.dtype) -> tuple[WeightLayout, ...]:
    """Return the layouts whose product this CPU and this torch have for the dtype."""
    usable = [WeightLayout.TRANSPOSED, WeightLayout.PLAIN]
    return tuple([*usable, WeightLayout.PACKED] if has_onednn(dtype) else usable)


@functools.cache
def has_onednn(dtype: torch.dtype) -> bool:
    """Return True if oneDNN multiplies this dtype on this CPU."""
    operations = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(operations, "_linear_pointwise"):
        return False
    if dtype is torch.bfloat16:
        return bool(operations._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(operations._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return oneDNN's product; without an operation after it."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product
