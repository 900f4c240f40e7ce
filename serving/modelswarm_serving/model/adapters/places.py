"""The places of a span's blocks that adapters are added to, in both forms of the blocks.

Used by `startup.py`. The fused form joins projections, so a module of the checkpoint is a range of outputs there. In
transformers' own form every module gets a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from modelswarm_serving.model.adapters.lora import Place, add_adapters
from modelswarm_serving.model.linear.replacement import MeasuredLinear

Locate: TypeAlias = Callable[[int, str], tuple[Place, int]]
"""(block within the span, module) -> place, and its first output there."""

_JOINED = {
    "self_attn.q_proj": ("qkv", ()),
    "self_attn.k_proj": ("qkv", ("self_attn.q_proj",)),
    "self_attn.v_proj": ("qkv", ("self_attn.q_proj", "self_attn.k_proj")),
    "self_attn.o_proj": ("out", ()),
    "mlp.gate_proj": ("gate_up", ()),
    "mlp.up_proj": ("gate_up", ("mlp.gate_proj",)),
    "mlp.down_proj": ("down", ()),
}
"""Module -> projection of a fused block, and the modules before it there."""


def locate_fused(
    sizes: Mapping[str, tuple[int, int]], block: int, module: str
) -> tuple[Place, int]:
    """Return the place in fused blocks; `sizes`: inputs and outputs by module."""
    name, before = _JOINED[module]
    return (block, name), sum(sizes[each][1] for each in before)


def locate_module(block: int, module: str) -> tuple[Place, int]:
    """Return the place in transformers' own blocks."""
    return (block, module), 0


def hook_modules(layers: Any) -> None:
    """Let all projections of transformers' own blocks ask for adapters."""
    for block, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear | Conv1D | MeasuredLinear):
                module.register_forward_hook(partial(_add_to_output, (block, name)))


def _add_to_output(
    place: Place, module: nn.Module, inputs: tuple[Any, ...], output: Tensor
) -> None:
    rows = inputs[0]
    add_adapters(output.view(-1, output.shape[-1]), rows.reshape(-1, rows.shape[-1]), place)
