"""Compares the tensors of a checkpoint with what config.json says: names, shapes, formats and the number of blocks.

Called by `facts.py` for the headers that it has read, in `plan`, in the operator's inspection and in each server. So a
model that would end in wrong text, as with one block too few, is refused before its weights are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from modelswarm.checkpoint.config_checks import UNQUANTISED, check_heads, positive_integer, refuse
from modelswarm.checkpoint.families import Bias, Family
from modelswarm.checkpoint.tensor_index import TensorEntry
from modelswarm.checkpoint.tensor_names import EMBEDDING, HEAD, NORM, ModelPart, block_of
from modelswarm.errors import ModelSourceError

STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Formats of stored weights: as safetensors writes them -> as this project does."""
_WITHOUT_EFFECT = ("self_attn.rotary_emb.inv_freq",)  # of older checkpoints; computed anew

Dimension: TypeAlias = tuple[str, int]
"""The fields of config.json that give one dimension, and their product."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """All tensors that config.json asks for."""

    path: Path  # of config.json
    family: str
    block: Mapping[str, tuple[Dimension, ...]]  # name within a block -> shape
    tables: Mapping[str, tuple[Dimension, ...]]  # canonical name -> shape

    def shape_of(self, name: str) -> tuple[Dimension, ...] | None:
        """Return the shape for a canonical name; None if the model has no such tensor."""
        if block_of(name) is None:
            return self.tables.get(name)
        return self.block.get(name.split(".", 3)[3])

    def names_of(self, part: ModelPart) -> list[str]:
        """Return the canonical names of all tensors of a part."""
        blocks = range(part.first, part.last)
        inner = [f"model.layers.{block}.{name}" for block in blocks for name in self.block]
        return [*inner, *sorted(part.table_names)]


def plan_tensors(text: Mapping[str, Any], family: Family, path: Path) -> TensorPlan:
    """Return the tensors of a checked config.json; `text` is its part for the text model."""
    hidden = ("hidden_size", positive_integer(text, "hidden_size", path))
    vocab = ("vocab_size", positive_integer(text, "vocab_size", path, family.vocab))
    tables = {EMBEDDING: (vocab, hidden), HEAD: (vocab, hidden), NORM: (hidden,)}
    block = {
        **_attention_tensors(text, family, path, hidden),
        **_mlp_tensors(text, family, path, hidden),
        **{f"{name}.weight": (hidden,) for name in _norms(family)},
    }
    return TensorPlan(path, family.name, block, tables)


def check_tensors(
    plan: TensorPlan, part: ModelPart, tensors: Mapping[str, TensorEntry], label: Path | str
) -> None:
    """Refuse tensors of a part that are missing, unknown, quantised or of another shape."""
    for name in sorted(tensors):
        if part.needs_tensor(name):
            _check_tensor(plan, name, tensors[name], label)
    found = {block_of(name) for name in tensors}
    for block in range(part.first, part.last):
        if block not in found:
            raise ModelSourceError("model", f"{label} has no weights for block {block}")
    for name in plan.names_of(part):
        if name not in tensors:
            raise ModelSourceError("model", f"{label} has no weights for {name}")


def check_block_count(n_blocks: int, names: Collection[str], path: Path) -> None:
    """Refuse a `num_hidden_layers` that is not the number of blocks in the files; `names` are canonical."""
    found = {block for name in names if (block := block_of(name)) is not None}
    count = max(found, default=-1) + 1
    if found and count != n_blocks:
        rule = f"allowed is {count}, the number of blocks that the files hold"
        refuse(path, "num_hidden_layers", n_blocks, rule)


def _check_tensor(plan: TensorPlan, name: str, entry: TensorEntry, label: Path | str) -> None:
    if name.endswith(_WITHOUT_EFFECT):
        return
    where = f"{label}: {entry.stored_name} in {entry.file}"
    if entry.dtype not in STORED_DTYPES:
        raise ModelSourceError("model", f"{where} is stored as {entry.dtype}; {UNQUANTISED}")
    shape = plan.shape_of(name)
    if shape is None:
        raise ModelSourceError(
            "model", f"{where} is no tensor of a {plan.family} model with this config.json"
        )
    if entry.shape != tuple(size for _, size in shape):
        asked = ", ".join(f"{field} {size}" for field, size in shape)
        raise ModelSourceError(
            "model", f"{where} has shape {list(entry.shape)}, but config.json says [{asked}]"
        )


def _attention_tensors(
    text: Mapping[str, Any], family: Family, path: Path, hidden: Dimension
) -> dict[str, tuple[Dimension, ...]]:
    heads, kv_heads, size = check_heads(text, family, path)
    queries = ("num_attention_heads x head_dim", heads * size)
    keys = ("num_key_value_heads x head_dim", kv_heads * size)
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    found: dict[str, tuple[Dimension, ...]] = {
        f"self_attn.{name}.weight": (rows, hidden) for name, rows in outputs.items()
    }
    found["self_attn.o_proj.weight"] = (hidden, queries)
    is_configured = family.bias is Bias.CONFIGURED and bool(text.get("attention_bias"))
    if is_configured or family.bias is Bias.QKV:
        found |= {f"self_attn.{name}.bias": (rows,) for name, rows in outputs.items()}
    if is_configured:
        found["self_attn.o_proj.bias"] = (hidden,)
    if family.has_head_norms:
        found |= {f"self_attn.{name}_norm.weight": (("head_dim", size),) for name in "qk"}
    return found


def _mlp_tensors(
    text: Mapping[str, Any], family: Family, path: Path, hidden: Dimension
) -> dict[str, tuple[Dimension, ...]]:
    field = "intermediate_size"
    inner = (field, positive_integer(text, field, path, family.intermediate))
    outputs = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    found: dict[str, tuple[Dimension, ...]] = {
        f"mlp.{name}.weight": shape for name, shape in outputs.items()
    }
    if family.has_mlp_bias and text.get("mlp_bias"):
        found |= {f"mlp.{name}.bias": shape[:1] for name, shape in outputs.items()}
    return found


def _norms(family: Family) -> tuple[str, ...]:
    norms = ("input_layernorm", "post_attention_layernorm")
    if not family.has_outer_norms:
        return norms
    return (*norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")
