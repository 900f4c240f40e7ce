"""One transformer block in few calls: the form that steps run.

transformers' blocks spend a large part of a decode step on Python and on small kernels (240 per block). The supported
families differ little, so one `FusedBlock` of about twenty calls covers them. It has fused q/k/v and gate/up
projections, one rotary pass over queries and keys, and residuals added by the matrix product. Made by `fusion.py` from
loaded modules. Weights exist once, in the layout that `linear/layout_choice.py` chooses. Knows no pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modelswarm_serving.model.adapters.lora import Place, add_adapters
from modelswarm_serving.model.attention.attention import attend
from modelswarm_serving.model.linear.weight import Weight
from modelswarm_serving.model.transformer.rotary import Angles


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Weight
    bias: Tensor | None
    place: Place  # by which adapters find it

    def __call__(self, rows: Tensor) -> Tensor:
        return add_adapters(self.weight.multiply(rows, self.bias), rows, self.place)

    def onto(self, base: Tensor, rows: Tensor) -> Tensor:
        """Return base + self(rows), in one product."""
        base = base if self.bias is None else base + self.bias
        return add_adapters(self.weight.multiply_onto(base, rows), rows, self.place)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm over the last axis, in float32.

    x w / sqrt(mean(x²) + eps) = x (w √n) / hypot(|x|, √(n eps)).

    Three small calls, while `F.rms_norm` makes six (measured between two matrix products, one row: 23 against 40 us).
    """

    weight: Tensor  # times √n
    floor: Tensor  # √(n eps)

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> Norm:
        n = weight.shape[-1]
        floor = torch.tensor((n * eps) ** 0.5, dtype=torch.float32, device=weight.device)
        return cls(weight.float() * n**0.5, floor)

    def __call__(self, rows: Tensor) -> Tensor:
        exact = rows.float()
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).hypot(self.floor)
        return (exact * self.weight).div_(length).type_as(rows)


@dataclass(frozen=True, slots=True)
class Attention:
    index: int  # in the span
    qkv: Linear  # to (heads + 2 kv_heads) * head_dim
    out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int | None
    softcap: float | None
    q_norm: Norm | None
    k_norm: Norm | None

    def __call__(self, rows: Tensor, angles: Angles) -> Tensor:
        """Attend, without the output projection: [T, hidden] -> [T, heads * head_dim]."""
        count = rows.shape[0]  # len() of a tensor is a call of Python
        parts = self.qkv(rows).view(count, -1, self.head_dim)
        turning = queries_keys = parts[:, : self.heads + self.kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = turning[:, : self.heads], turning[:, self.heads :]
            turning = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        cos, sin = angles
        swapped = turning.roll(self.head_dim // 2, -1)
        if torch.is_grad_enabled():  # a backward pass needs the projections as they were
            turned = torch.addcmul(turning * cos, swapped, sin)
            parts = torch.cat((turned, parts[:, self.heads + self.kv_heads :]), dim=1)
        else:
            torch.addcmul(turning * cos, swapped, sin, out=queries_keys)
        attended = attend(
            self.index,
            parts[:, : self.heads],
            parts[:, self.heads :].view(count, 2, self.kv_heads, self.head_dim),
            self.scaling,
            self.window,
            self.softcap,
        )
        return attended.reshape(count, -1)


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """One transformer block; the two outer norms exist in Gemma only."""

    layer_type: str
    attention: Attention
    gate_up: Linear  # to 2 * inner
    down: Linear
    activation: Callable[[Tensor], Tensor]
    before_attention: Norm
    after_attention: Norm | None
    before_mlp: Norm
    after_mlp: Norm | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.attention.qkv, self.attention.out, self.gate_up, self.down

    def __call__(self, rows: Tensor, angles: Angles) -> Tensor:
        attended = self.attention(self.before_attention(rows), angles)
        rows = _add(rows, attended, self.attention.out, self.after_attention)
        gate, up = self.gate_up(self.before_mlp(rows)).chunk(2, dim=-1)
        inner = self.activation(gate)
        # A backward pass needs the result of some activations, such as ReLU, as it was.
        inner = inner * up if torch.is_grad_enabled() else inner.mul_(up)
        return _add(rows, inner, self.down, self.after_mlp)


def _add(rows: Tensor, inner: Tensor, project: Linear, norm: Norm | None) -> Tensor:
    if norm is None:
        return project.onto(rows, inner)
    return rows + norm(project(inner))
