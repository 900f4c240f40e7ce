"""Compares the tensors of a checkpoint with what config.json says: names, shapes, formats and the number of blocks.

Called by `facts.py` for the headers that it has read, in `plan`, in the operator's inspection and in each server. So a
model that would end in wrong text, as with one block too few, is refused before its weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from modelswarm.checkpoint.config.config_checks import UNQUANTISED
from modelswarm.checkpoint.config.fields import Dimension, Fields, refuse
from modelswarm.checkpoint.families.family import Family, Shapes
from modelswarm.checkpoint.tensor_index import TensorEntry
from modelswarm.checkpoint.tensor_names import ModelPart, block_of, name_in_block
from modelswarm.errors import ModelSourceError

STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Formats of stored weights: as safetensors writes them -> as this project does."""
PACKED, SCALES = "_blocks", "_scales"
"""Endings of the tensors of MXFP4: two weights per byte, and the exponents of their common scales."""

Planned: TypeAlias = Mapping[str, tuple[Dimension, ...]]
"""Name -> shape."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """All tensors that config.json asks for."""

    family: Family
    dense: Planned  # by name within a block without experts
    sparse: Planned  # by name within a block with experts
    sparse_blocks: frozenset[int]
    tables: Planned  # by canonical name
    kv_elements: int  # of one position in one block
    spare_blocks: int  # in the files beside those of the model

    def shapes_in(self, block: int) -> Planned:
        """Return the tensors of one block by their names within it."""
        return self.sparse if block in self.sparse_blocks else self.dense

    def shape_of(self, name: str) -> tuple[Dimension, ...] | None:
        """Return the shape for a canonical name; None if the model has no such tensor."""
        block = block_of(name)
        if block is None:
            return self.tables.get(name)
        return self.shapes_in(block).get(name_in_block(name))

    def names_of(self, part: ModelPart) -> list[str]:
        """Return the canonical names of all tensors of a part."""
        blocks = range(part.first, part.last)
        start = self.family.tables.blocks
        inner = [f"{start}.{block}.{name}" for block in blocks for name in self.shapes_in(block)]
        return [*inner, *sorted(part.table_names)]

    def block_sizes(self, n_blocks: int) -> list[int]:
        """Return the elements of each block."""
        dense, sparse = _elements(self.dense), _elements(self.sparse)
        return [sparse if block in self.sparse_blocks else dense for block in range(n_blocks)]

    def table_elements(self) -> int:
        """Return the elements of the embedding, with its learned positions."""
        tables = self.family.tables
        names = (tables.embedding, tables.positions)
        return sum(_size(self.tables[name]) for name in names if name is not None)


def plan_tensors(fields: Fields) -> TensorPlan:
    """Return the tensors of a checked config.json."""
    family = fields.family
    common = dict(family.block)
    for condition, shapes in family.optional.items():
        if bool(fields.get(condition.removeprefix("!"))) != condition.startswith("!"):
            common |= shapes
    blocks = range(fields.integer("num_hidden_layers"))
    has_experts = bool(family.experts) and bool(fields.get(family.expert_count))
    sparse_blocks = frozenset(
        block for block in blocks if has_experts and family.has_experts(fields.values, block)
    )
    return TensorPlan(
        family,
        dense=_resolve(fields, {**common, **family.mlp}),
        sparse=_resolve(fields, {**common, **family.experts}) if sparse_blocks else {},
        sparse_blocks=sparse_blocks,
        tables=_table_shapes(fields),
        kv_elements=fields.dimension(family.kv)[1],
        spare_blocks=int(fields.get(family.spare_blocks) or 0),
    )


def _resolve(fields: Fields, shapes: Shapes) -> Planned:
    found: dict[str, tuple[Dimension, ...]] = {}
    for name, text in shapes.items():
        shape = tuple(fields.dimension(each) for each in text.split())
        count = fields.integer(fields.family.expert_count) if "*" in name else 1
        found |= {name.replace("*", str(expert)): shape for expert in range(count)}
    return found


def _table_shapes(fields: Fields) -> Planned:
    tables = fields.family.tables
    hidden, vocab = fields.dimension("hidden_size"), fields.dimension("vocab_size")
    found = dict.fromkeys((*tables.norm, *tables.embedding_norm), (hidden,))
    shapes = {**found, tables.embedding: (vocab, hidden), tables.head: (vocab, hidden)}
    if tables.positions is not None:
        shapes[tables.positions] = (fields.dimension(tables.position_rows), hidden)
    return shapes


def _elements(shapes: Planned) -> int:
    """Return the number of weights; a byte of packed blocks holds two."""
    return sum(_size(shape) * (1 + name.endswith(PACKED)) for name, shape in shapes.items())


def _size(shape: tuple[Dimension, ...]) -> int:
    return math.prod(size for _, size in shape)


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


def check_block_count(
    n_blocks: int, names: Collection[str], path: Path, spare_blocks: int = 0
) -> None:
    """Refuse a `num_hidden_layers` that is not the number of blocks in the files; `names` are canonical."""
    found = {block for name in names if (block := block_of(name)) is not None}
    count = max(found, default=-1) + 1
    if found and not n_blocks <= count <= n_blocks + spare_blocks:
        rule = f"allowed is {count}, the number of blocks that the files hold"
        refuse(path, "num_hidden_layers", n_blocks, rule)


def _check_tensor(plan: TensorPlan, name: str, entry: TensorEntry, label: Path | str) -> None:
    if name.endswith(plan.family.unused):
        return
    where = f"{label}: {entry.stored_name} in {entry.file}"
    is_packed = name.endswith((PACKED, SCALES)) and entry.dtype == "U8"
    if entry.dtype not in STORED_DTYPES and not is_packed:
        raise ModelSourceError("model", f"{where} is stored as {entry.dtype}; {UNQUANTISED}")
    shape = plan.shape_of(name)
    if shape is None:
        raise ModelSourceError(
            "model", f"{where} is no tensor of a {plan.family.name} model with this config.json"
        )
    if entry.shape != tuple(size for _, size in shape):
        asked = ", ".join(f"{field} {size}" for field, size in shape)
        raise ModelSourceError(
            "model", f"{where} has shape {list(entry.shape)}, but config.json says [{asked}]"
        )
