"""The form of a span's blocks and the layout of their weights, checked against the model's own forward.

Called by `startup.py`: blocks are fused if the family has that form, else transformers' own. On a CPU their weights get
the layout that `layout_choice.py` measures. Knows no options and no files.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelswarm.checkpoint.families.family import BlockPath
from modelswarm.errors import ModelSwarmError, UserError
from modelswarm_serving.model.attention.attention import SDPA
from modelswarm_serving.model.attention.backend import AttentionBackend
from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.attention.selection import choose_backend, fall_back
from modelswarm_serving.model.device import Device, fault_text, memory_fault
from modelswarm_serving.model.linear.layout_choice import (
    UNMEASURED,
    LayoutChoice,
    choose_layout,
    is_large,
)
from modelswarm_serving.model.linear.layouts import AUTO, WeightLayout
from modelswarm_serving.model.linear.replacement import projections, replace_projections
from modelswarm_serving.model.linear.weight import Weight, usable_layouts
from modelswarm_serving.model.transformer.fusion import FusedBlocks
from modelswarm_serving.model.transformer.generic_blocks import GenericBlocks
from modelswarm_serving.model.transformer.loading import LoadedSpan
from modelswarm_serving.model.transformer.self_check import (
    SelfCheck,
    check_blocks,
    run_decode,
    run_reference,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedBlocks:
    blocks: FusedBlocks | GenericBlocks
    check: SelfCheck
    layout: LayoutChoice | None  # None: transformers' own modules have the weights


def choose_blocks(
    loaded: LoadedSpan,
    cache: KvCache,
    folder: Path,
    sessions: int,
    wanted: str = AUTO,
) -> ServedBlocks:
    """Return blocks for `check_served`; also lay out the head. `sessions`: of full length, that the pages hold.

    `wanted`: a layout that `check_layout` accepts. `folder` is for errors.
    """
    is_cpu = cache.device.type == "cpu"
    # Not kept: it holds the loaded blocks, whose weights would exist twice once they are fused.
    check = run_reference(loaded, GenericBlocks(loaded.body, loaded.blocks_name), cache, folder)
    blocks: FusedBlocks | GenericBlocks
    weights: list[Weight] = []
    if loaded.family.path is not BlockPath.GENERIC:
        blocks = FusedBlocks(loaded.body, cache.dtype)
        weights = blocks.weights
    else:
        blocks = GenericBlocks(loaded.body, loaded.blocks_name)
        if is_cpu:
            weights = _replace_large(getattr(loaded.body, loaded.blocks_name), cache.dtype, wanted)
    layout = UNMEASURED if weights else None
    if weights and is_cpu:
        layout = choose_layout(weights, cache.dtype, sessions, wanted)
        log.info("%s", layout)
    chosen = WeightLayout.TRANSPOSED if layout is None else layout.layout
    heads = [] if loaded.head is None else [loaded.head]
    for weight in (*weights, *heads):  # one at a time, so that no more than one exists twice
        weight.lay_out(chosen)
    return ServedBlocks(blocks, check, layout)


def check_served(
    served: ServedBlocks,
    cache: KvCache,
    device: Device,
    folder: Path,
    wanted: str,
    max_length: int,
) -> AttentionBackend:
    """Check the blocks, and return the attention backend over which they did.

    `wanted`: its name; auto: the reference where Triton, its compiler or the driver has a fault.
    """
    blocks, check = served.blocks, served.check
    backend = choose_backend(wanted, cache, device)
    if backend is not SDPA:
        try:
            check_blocks(blocks, check, cache, folder, backend)
            run_decode(blocks, check, cache, max_length, backend)
            return backend
        except ModelSwarmError:
            raise
        except Exception as error:  # assertions of the driver, compilers, limits of the device
            if isinstance(error, RuntimeError) and memory_fault(error) is not None:
                raise
            device.check_alive()
            backend = fall_back(wanted, device, fault_text(error))
    if served.layout is not None:
        check_blocks(blocks, check, cache, folder, backend)
    return backend


def check_layout(wanted: str, device: Device, dtype: str) -> None:
    """Raise UserError if the device has no product for the wanted layout."""
    if wanted == AUTO:
        return
    if not device.is_cpu:
        raise UserError(
            "weight_layout", f"is of a CPU, but the server computes on {device}; allowed: {AUTO}"
        )
    usable = usable_layouts(getattr(torch, dtype))
    if wanted not in usable:
        raise UserError(
            "weight_layout",
            f"this CPU has no product of {wanted} {dtype}; allowed: {', '.join((AUTO, *usable))}",
        )


def _replace_large(layers: Any, dtype: torch.dtype, wanted: str) -> list[Weight]:
    """Replace the projections of transformers' blocks if their layout is wanted or worth a measurement."""
    count = sum(module.weight.numel() for _, _, module in projections(layers))
    if wanted == AUTO and not is_large(count, dtype):
        return []
    return replace_projections(layers)
