"""The adapters of a span: read at the start, and found by the names that batch items carry.

Made by `startup.py`, used by `span.py`. Knows no sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from modelswarm.checkpoint.config.adapter_config import WEIGHTS_FILE, AdapterFacts, Projection
from modelswarm.errors import UserError
from modelswarm.protocol.identity import Adapter
from modelswarm_serving.model.adapters.lora import (
    AdapterRows,
    Delta,
    LoraWeights,
    Place,
    adapter_context,
)
from modelswarm_serving.model.adapters.places import Locate
from modelswarm_serving.model.attention.attention import SDPA, attention_context
from modelswarm_serving.model.attention.backend import AttentionBackend
from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.attention.staging import to_index
from modelswarm_serving.model.attention.step_layout import Blocks, StepLayout
from modelswarm_serving.model.transformer.self_check import SelfCheck


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """All adapters that sessions may name here."""

    adapters: Collection[Adapter]
    weights: Mapping[str, LoraWeights]  # by name

    def has(self, name: str) -> bool:
        return not name or name in self.weights

    def groups_of(self, layout: StepLayout, device: torch.device) -> list[AdapterRows]:
        """Return the rows of each adapter in a step; nothing if no item has one."""
        places: dict[str, list[int]] = {}
        for start, item in zip(layout.starts, layout.items, strict=True):
            if item.adapter:
                places.setdefault(item.adapter, []).extend(range(start, start + item.count))
        if len(places) == 1 and len(next(iter(places.values()))) == layout.rows:
            return [AdapterRows(self.weights[next(iter(places))], None)]
        return [
            AdapterRows(self.weights[name], to_index(rows, device)) for name, rows in places.items()
        ]


NO_ADAPTERS = AdapterTable((), {})


def load_weights(
    facts: AdapterFacts, first: int, locate: Locate, dtype: torch.dtype, device: torch.device
) -> LoraWeights:
    """Read the tensors of a span that begins at block `first`."""
    deltas: dict[Place, list[Delta]] = {}
    try:
        with safe_open(facts.folder / WEIGHTS_FILE, framework="pt") as tensors:
            for each in facts.projections:
                place, start = locate(each.block - first, each.module)
                delta = _read_delta(tensors, each, start, dtype, device)
                deltas.setdefault(place, []).append(delta)
    except (SafetensorError, OSError) as error:
        raise UserError("adapters", f"{facts.folder} cannot be read: {error}") from error
    return LoraWeights(deltas)


def _read_delta(
    tensors: Any, each: Projection, start: int, dtype: torch.dtype, device: torch.device
) -> Delta:
    a, b = tensors.get_tensor(each.a).float(), tensors.get_tensor(each.b).float()
    if not (a.isfinite().all() and b.isfinite().all()):
        where = f"{each.module} of block {each.block}"
        raise UserError("adapters", f"{where} has values that are not finite")
    scaled = (b * each.scale).t().contiguous()
    return Delta(a.t().contiguous().to(device, dtype), scaled.to(device, dtype), start)


@torch.inference_mode()
def check_adapter(
    name: str,
    weights: LoraWeights,
    blocks: Blocks,
    check: SelfCheck,
    cache: KvCache,
    backend: AttentionBackend = SDPA,
) -> None:
    """Check that every projection with an adapter asks for it: some modules use a weight without their forward."""
    used: set[Place] = set()
    groups = [AdapterRows(weights, None)]
    with (
        attention_context(check.layout, cache, backend=backend),
        adapter_context(groups, check.layout.rows, used),
    ):
        try:
            blocks.run(check.rows, check.layout, 0, cache.shape.blocks)
        except RuntimeError as error:
            raise UserError(f"adapters: {name}", f"this model cannot have it: {error}") from error
    cache.clear(check.layout.rows)
    if missing := sorted(set(weights.deltas) - used):
        block, module = missing[0]
        detail = f"{module} of block {block} of the span cannot have an adapter in this family"
        raise UserError(f"adapters: {name}", detail)
