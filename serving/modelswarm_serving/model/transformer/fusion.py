"""Turns the loaded blocks of a span into `FusedBlock`s and runs them.

Called by `startup.py`, used by `span.py`. Takes the weights out of the loaded modules one block at a time, so that no
weight exists twice. `self_check.py` compares both forms at every start; that check makes this module safe. Knows no
files.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelswarm_serving.model.adapters.lora import Place
from modelswarm_serving.model.attention.step_layout import RowLayout
from modelswarm_serving.model.linear.weight import Weight
from modelswarm_serving.model.transformer.fused_block import Attention, FusedBlock, Linear, Norm
from modelswarm_serving.model.transformer.rotary import Rotary


class FusedBlocks:
    """The span's blocks, ready to run any part of them."""

    def __init__(self, body: Any, dtype: torch.dtype) -> None:
        """Take the weights out of `body`, which cannot be used afterwards; they keep the layout of the checkpoint."""
        kinds = _layer_types(body.config)
        self._rotary = Rotary(body.rotary_emb, kinds, dtype)
        self._blocks: list[FusedBlock] = []
        for index, kind in enumerate(kinds):
            self._blocks.append(_fuse_block(body.layers[index], index, kind))
            body.layers[index] = nn.Identity()  # frees what was copied

    @property
    def weights(self) -> list[Weight]:
        """The matrices of all blocks."""
        return [linear.weight for block in self._blocks for linear in block.linears]

    def run(self, rows: Tensor, layout: RowLayout, start: int, end: int) -> Tensor:
        """Run rows [T, hidden] through blocks [start, end), counted from the span's first block."""
        angles = self._rotary(layout)
        for block in self._blocks[start:end]:
            rows = block(rows, angles[block.layer_type])
        return rows


def _layer_types(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["full_attention"] * int(config.num_hidden_layers)


def _fuse_block(layer: Any, index: int, kind: str) -> FusedBlock:
    mlp = layer.mlp
    gemma = hasattr(layer, "pre_feedforward_layernorm")
    return FusedBlock(
        layer_type=kind,
        attention=_fuse_attention(layer.self_attn, index),
        gate_up=_join_linears((index, "gate_up"), mlp.gate_proj, mlp.up_proj),
        down=_join_linears((index, "down"), mlp.down_proj),
        activation=F.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn,
        before_attention=_norm(layer.input_layernorm),
        after_attention=_norm(layer.post_attention_layernorm) if gemma else None,
        before_mlp=_norm(
            layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm
        ),
        after_mlp=_norm(layer.post_feedforward_layernorm) if gemma else None,
    )


def _fuse_attention(module: Any, index: int) -> Attention:
    size = module.head_dim
    projections = (module.q_proj, module.k_proj, module.v_proj)
    return Attention(
        index=index,
        qkv=_join_linears((index, "qkv"), *projections),
        out=_join_linears((index, "out"), module.o_proj),
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
    """Return the sliding window: Mistral keeps it in the configuration, the others per block, Llama has none."""
    holder = module.config if "Mistral" in type(module).__name__ else module
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def _join_linears(place: Place, *linears: nn.Linear) -> Linear:
    """Return several projections of the same rows as one."""
    weight = Weight(torch.cat([linear.weight for linear in linears]))
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return Linear(weight, torch.cat(biases) if biases else None, place)


def _norm(module: Any) -> Norm:
    """Convert a norm. Gemma stores the weight minus one, and multiplies in float32."""
    if "Gemma" in type(module).__name__:
        return Norm.of(1.0 + module.weight.float(), module.eps)
    return Norm.of(module.weight, module.variance_epsilon)
