"""What a model is and what it weighs, from config.json and safetensors headers (no torch).

Used by placement (bytes per block, KV bytes per token), by the server before it loads a span, and by the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelswarm.checkpoint.families import FAMILIES, Family
from modelswarm.checkpoint.json_files import read_json
from modelswarm.checkpoint.tensor_index import Entry, read_tensors
from modelswarm.checkpoint.tensor_names import Part, block_of
from modelswarm.errors import ModelSourceError, UserError

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Names of the number formats a span can run in, and their bytes."""
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Outline:
    """What config.json alone says."""

    family: str
    n_blocks: int
    hidden: int
    vocab: int
    context: int  # most positions of one session
    tied: bool  # the head's weight is the embedding's

    def part(self, first: int, last: int) -> Part:
        """Blocks [first, last); a UserError when the model has no such blocks."""
        if not 0 <= first < last <= self.n_blocks:
            raise UserError(
                "blocks",
                f"{first}:{last} is out of range: the model has blocks 0:{self.n_blocks} "
                "and a span needs at least one",
            )
        return Part(first, last, self.n_blocks, self.tied)

    @property
    def whole(self) -> Part:
        return self.part(0, self.n_blocks)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes are in elements where bytes depend on the dtype the model is run in."""

    outline: Outline
    dtype: str  # that the weights are stored in
    block_elements: int  # of the largest block
    embedding_elements: int
    kv_elements: int  # keys and values of one position in one block

    def weight_bytes(self, first: int, last: int, dtype: str) -> int:
        """Weights of a server that holds blocks [first, last)."""
        part = self.outline.part(first, last)
        tables = int(part.is_head) + int(part.is_tail)
        if self.outline.tied and part.is_head and part.is_tail:
            tables = 1
        elements = (last - first) * self.block_elements + tables * self.embedding_elements
        return elements * DTYPES[dtype]

    def kv_bytes(self, dtype: str) -> int:
        """Of one position in one block."""
        return self.kv_elements * DTYPES[dtype]

    def row_bytes(self, dtype: str) -> int:
        """Of one row at a block boundary."""
        return self.outline.hidden * DTYPES[dtype]


def read_outline(folder: Path) -> Outline:
    """From config.json; refuses a folder that is missing or of a family that is not served."""
    if not folder.is_dir():
        raise ModelSourceError("model", f"{folder} is not a folder")
    config = read_json(folder / "config.json")
    family = _family(config, folder)
    nested = config.get("text_config") if family.nested else None
    text = nested if isinstance(nested, dict) else config
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", family.tied))
    return Outline(
        family=family.name,
        n_blocks=_number(text, "num_hidden_layers", folder),
        hidden=_number(text, "hidden_size", folder),
        vocab=_number(text, "vocab_size", folder, family.vocab),
        context=_number(text, "max_position_embeddings", folder, family.context),
        tied=bool(tied),
    )


def read_facts(folder: Path, blocks: tuple[int, int] | None = None) -> ModelFacts:
    """Facts of a checkpoint folder. With `blocks`, only the shards that this span needs must be present."""
    outline = read_outline(folder)
    part = outline.whole if blocks is None else outline.part(*blocks)
    return weigh(outline, part, read_tensors(folder, part.needs), folder)


def weigh(
    outline: Outline, part: Part, tensors: Mapping[str, Entry], where: Path | str
) -> ModelFacts:
    """Facts from the headers of the part's tensors; `where` is what messages call the model."""
    for name in part.tables:
        if name not in tensors:
            raise ModelSourceError("model", f"{where} has no weights for {name}")
    keys = _key_projection(tensors, part.first, where)
    return ModelFacts(
        outline=outline,
        dtype=_STORED.get(keys.dtype, "float32"),
        block_elements=max(_elements(tensors, b, where) for b in range(part.first, part.last)),
        embedding_elements=outline.hidden * outline.vocab,
        kv_elements=2 * keys.shape[0],
    )


def _family(config: Mapping[str, Any], folder: Path) -> Family:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        allowed = ", ".join(sorted({family.name for family in FAMILIES.values()}))
        raise ModelSourceError(
            "model", f"{folder} is of family {model_type!r}; supported families are {allowed}"
        )
    return FAMILIES[str(model_type)]


def _number(text: Mapping[str, Any], name: str, folder: Path, default: int | None = None) -> int:
    value = text.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise ModelSourceError("model", f"{folder / 'config.json'} needs a positive {name}")
    return value


def _key_projection(tensors: Mapping[str, Entry], block: int, where: Path | str) -> Entry:
    """Its rows are kv heads x head size, whatever config.json leaves to defaults."""
    name = f"model.layers.{block}.self_attn.k_proj.weight"
    if name not in tensors:
        raise ModelSourceError("model", f"{where} has no weights for block {block}")
    return tensors[name]


def _elements(tensors: Mapping[str, Entry], block: int, where: Path | str) -> int:
    _key_projection(tensors, block, where)
    return sum(math.prod(e.shape) for name, e in tensors.items() if block_of(name) == block)
