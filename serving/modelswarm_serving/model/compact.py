"""The same blocks with fewer calls: what a step really runs.

transformers' blocks spend a large part of a decode step on Python and on small kernels (240 per block). The supported
families differ little, so one `Block` of about twenty calls covers them: fused q/k/v and gate/up projections, one
rotary pass over queries and keys, residuals added by the matrix product. `Blocks` takes the weights out of the loaded
modules one block at a time, so no weight exists twice. `guards.py` compares the two forms at every start; that check
is what makes this module safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelswarm_serving.model.attention import attend
from modelswarm_serving.model.batch import Batch

Angles = tuple[Tensor, Tensor]
"""cos and signed sin of the step's rows, each [T, 1, head_dim]."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm over the last axis, in float32.

    x w / sqrt(mean(x²) + eps) = x (w √n) / hypot(|x|, √(n eps)): three small calls, where `F.rms_norm` makes six
    (measured between two matrix products, one row: 23 against 40 us).
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
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).hypot_(self.floor)
        return (exact * self.weight).div_(length).type_as(rows)


@dataclass(frozen=True, slots=True)
class Attention:
    index: int  # in the span
    qkv: Tensor  # [hidden, (heads + 2 kv_heads) * head_dim]
    bias: Tensor | None
    out: Tensor  # [heads * head_dim, hidden]
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int | None
    softcap: float | None
    q_norm: Norm | None
    k_norm: Norm | None

    def __call__(self, rows: Tensor, angles: Angles) -> Tensor:
        """[T, hidden] -> [T, heads * head_dim], before the output projection."""
        mixed = rows @ self.qkv if self.bias is None else torch.addmm(self.bias, rows, self.qkv)
        parts = mixed.view(len(rows), -1, self.head_dim)
        turning = queries_keys = parts[:, : self.heads + self.kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = turning[:, : self.heads], turning[:, self.heads :]
            turning = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        cos, sin = angles
        swapped = turning.roll(self.head_dim // 2, -1)
        torch.addcmul(turning * cos, swapped, sin, out=queries_keys)
        attended = attend(
            self.index,
            parts[:, : self.heads],
            parts[:, self.heads :].view(len(rows), 2, self.kv_heads, self.head_dim),
            self.scaling,
            self.window,
            self.softcap,
        )
        return attended.reshape(len(rows), -1)


@dataclass(frozen=True, slots=True)
class Block:
    """One transformer block; the two outer norms exist in Gemma only."""

    layer_type: str
    attention: Attention
    gate_up: Tensor  # [hidden, 2 * inner]
    down: Tensor  # [inner, hidden]
    activation: Callable[[Tensor], Tensor]
    before_attention: Norm
    after_attention: Norm | None
    before_mlp: Norm
    after_mlp: Norm | None

    def __call__(self, rows: Tensor, angles: Angles) -> Tensor:
        attended = self.attention(self.before_attention(rows), angles)
        rows = _add(rows, attended, self.attention.out, self.after_attention)
        gate, up = (self.before_mlp(rows) @ self.gate_up).chunk(2, dim=-1)
        return _add(rows, self.activation(gate).mul_(up), self.down, self.after_mlp)


def _add(rows: Tensor, inner: Tensor, weight: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return torch.addmm(rows, inner, weight)
    return rows + norm(inner @ weight)


class Rotary:
    """cos and sin by position, made by the model's own rotary module, once per position."""

    def __init__(self, module: Any, layer_types: list[str], dtype: torch.dtype) -> None:
        self._module = module
        self._per_type = hasattr(module, "layer_types")  # Gemma 3: one base per layer type
        self._types = sorted(set(layer_types))
        self._dtype = dtype
        self._tables: dict[str, Angles] = {}
        self._known = 0

    def __call__(self, positions: Tensor, highest: int) -> dict[str, Angles]:
        """Angles of these positions by layer type; `highest` is their maximum."""
        if highest >= self._known:
            self._grow(max(256, 1 << (highest + 1).bit_length()), positions.device)
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
        self._known = length


class Blocks:
    """The span's blocks, ready to run any part of them."""

    def __init__(self, body: Any, dtype: torch.dtype) -> None:
        """Takes the weights out of `body`, which is of no use afterwards."""
        kinds = _layer_types(body.config)
        self._rotary = Rotary(body.rotary_emb, kinds, dtype)
        self._blocks: list[Block] = []
        for index, kind in enumerate(kinds):
            self._blocks.append(_convert(body.layers[index], index, kind))
            body.layers[index] = nn.Identity()  # frees what was copied

    def run(self, rows: Tensor, batch: Batch, start: int, end: int) -> Tensor:
        """[T, hidden] through blocks [start, end), counted from the span's first."""
        angles = self._rotary(batch.positions, batch.highest)
        for block in self._blocks[start:end]:
            rows = block(rows, angles[block.layer_type])
        return rows


def _layer_types(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["full_attention"] * int(config.num_hidden_layers)


def _convert(layer: Any, index: int, kind: str) -> Block:
    mlp = layer.mlp
    gemma = hasattr(layer, "pre_feedforward_layernorm")
    return Block(
        layer_type=kind,
        attention=_convert_attention(layer.self_attn, index),
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=_joined(mlp.down_proj),
        activation=F.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn,
        before_attention=_norm(layer.input_layernorm),
        after_attention=_norm(layer.post_attention_layernorm) if gemma else None,
        before_mlp=_norm(
            layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm
        ),
        after_mlp=_norm(layer.post_feedforward_layernorm) if gemma else None,
    )


def _convert_attention(module: Any, index: int) -> Attention:
    size = module.head_dim
    projections = (module.q_proj, module.k_proj, module.v_proj)
    biases = [p.bias for p in projections if p.bias is not None]
    return Attention(
        index=index,
        qkv=_joined(*projections),
        bias=torch.cat(biases) if biases else None,
        out=_joined(module.o_proj),
        heads=module.q_proj.out_features // size,
        kv_heads=module.k_proj.out_features // size,
        head_dim=size,
        scaling=module.scaling,
        window=_window(module),
        softcap=module.attn_logit_softcapping if "Gemma2" in type(module).__name__ else None,
        q_norm=_norm(module.q_norm) if hasattr(module, "q_norm") else None,
        k_norm=_norm(module.k_norm) if hasattr(module, "k_norm") else None,
    )


def _window(module: Any) -> int | None:
    """Mistral keeps it in the configuration, the others per block; Llama has none."""
    holder = module.config if "Mistral" in type(module).__name__ else module
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def _joined(*linears: nn.Linear) -> Tensor:
    """Weights side by side as [in, out], the layout that is read fastest for few rows."""
    return torch.cat([linear.weight for linear in linears]).t().contiguous()


def _norm(module: Any) -> Norm:
    """Gemma stores the weight's distance from one, and multiplies in float32."""
    if "Gemma" in type(module).__name__:
        return Norm.of(1.0 + module.weight.float(), module.eps)
    return Norm.of(module.weight, module.variance_epsilon)
