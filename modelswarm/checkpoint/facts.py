"""Configuration and sizes of a model, from config.json and safetensors headers (no torch).

Used by placement (bytes per block, KV bytes per token), by the server before it loads a span, and by the tests. Knows
no addresses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelswarm.checkpoint.families import FAMILIES, Family
from modelswarm.checkpoint.json_files import read_json
from modelswarm.checkpoint.tensor_index import TensorEntry, read_tensors
from modelswarm.checkpoint.tensor_names import ModelPart, block_of
from modelswarm.errors import ModelSourceError, UserError

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Names of the number formats a span can run in, and their bytes."""
_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts of config.json alone."""

    family: str
    n_blocks: int
    hidden: int
    vocab: int
    context: int  # most positions of one session
    tied: bool  # the head's weight is the embedding's

    def part(self, first: int, last: int) -> ModelPart:
        """Return blocks [first, last); UserError if the model has no such blocks."""
        if not 0 <= first < last <= self.n_blocks:
            raise UserError(
                "blocks",
                f"{first}:{last} is out of range: the model has blocks 0:{self.n_blocks} "
                "and a span needs at least one",
            )
        return ModelPart(first, last, self.n_blocks, self.tied)

    @property
    def all_blocks(self) -> ModelPart:
        return self.part(0, self.n_blocks)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model, in elements where the bytes depend on the dtype at run time."""

    config: ModelConfig
    dtype: str  # of the stored weights
    block_elements: int  # of the largest block
    embedding_elements: int
    kv_elements: int  # keys and values of one position in one block

    def weight_bytes(self, first: int, last: int, dtype: str) -> int:
        """Return the weights of a server that holds blocks [first, last), in bytes."""
        part = self.config.part(first, last)
        tables = int(part.is_head) + int(part.is_tail)
        if self.config.tied and part.is_head and part.is_tail:
            tables = 1
        elements = (last - first) * self.block_elements + tables * self.embedding_elements
        return elements * DTYPES[dtype]

    def kv_bytes(self, dtype: str) -> int:
        """Return the KV bytes of one position in one block."""
        return self.kv_elements * DTYPES[dtype]

    def row_bytes(self, dtype: str) -> int:
        """Return the bytes of one row at a block boundary."""
        return self.config.hidden * DTYPES[dtype]


def read_config(folder: Path) -> ModelConfig:
    """Read config.json; refuse a missing folder and a family that is not supported."""
    if not folder.is_dir():
        raise ModelSourceError("model", f"{folder} is not a folder")
    config = read_json(folder / "config.json")
    family = _family_of(config, folder)
    nested = config.get("text_config") if family.nested else None
    text = nested if isinstance(nested, dict) else config
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", family.tied))
    return ModelConfig(
        family=family.name,
        n_blocks=_positive_integer(text, "num_hidden_layers", folder),
        hidden=_positive_integer(text, "hidden_size", folder),
        vocab=_positive_integer(text, "vocab_size", folder, family.vocab),
        context=_positive_integer(text, "max_position_embeddings", folder, family.context),
        tied=bool(tied),
    )


def read_facts(folder: Path, blocks: tuple[int, int] | None = None) -> ModelFacts:
    """Read the facts of a checkpoint folder. With `blocks`, only the shards of this span must be present."""
    config = read_config(folder)
    part = config.all_blocks if blocks is None else config.part(*blocks)
    return facts_from_tensors(config, part, read_tensors(folder, part.needs_tensor), folder)


def facts_from_tensors(
    config: ModelConfig, part: ModelPart, tensors: Mapping[str, TensorEntry], label: Path | str
) -> ModelFacts:
    """Return the facts from the headers of the part's tensors; errors call the model `label`."""
    for name in part.table_names:
        if name not in tensors:
            raise ModelSourceError("model", f"{label} has no weights for {name}")
    keys = _key_projection(tensors, part.first, label)
    return ModelFacts(
        config=config,
        dtype=_STORED_DTYPES.get(keys.dtype, "float32"),
        block_elements=max(
            _block_elements(tensors, b, label) for b in range(part.first, part.last)
        ),
        embedding_elements=config.hidden * config.vocab,
        kv_elements=2 * keys.shape[0],
    )


def _family_of(config: Mapping[str, Any], folder: Path) -> Family:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        allowed = ", ".join(sorted({family.name for family in FAMILIES.values()}))
        raise ModelSourceError(
            "model", f"{folder} is of family {model_type!r}; supported families are {allowed}"
        )
    return FAMILIES[str(model_type)]


def _positive_integer(
    text: Mapping[str, Any], name: str, folder: Path, default: int | None = None
) -> int:
    value = text.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise ModelSourceError("model", f"{folder / 'config.json'} needs a positive {name}")
    return value


def _key_projection(
    tensors: Mapping[str, TensorEntry], block: int, label: Path | str
) -> TensorEntry:
    """Return the key projection of a block: its rows are kv heads x head size, also if config.json has defaults."""
    name = f"model.layers.{block}.self_attn.k_proj.weight"
    if name not in tensors:
        raise ModelSourceError("model", f"{label} has no weights for block {block}")
    return tensors[name]


def _block_elements(tensors: Mapping[str, TensorEntry], block: int, label: Path | str) -> int:
    _key_projection(tensors, block, label)
    return sum(math.prod(e.shape) for name, e in tensors.items() if block_of(name) == block)
