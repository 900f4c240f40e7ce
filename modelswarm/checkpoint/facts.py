"""Configuration and sizes of a model, from config.json and safetensors headers (no torch).

Used by placement (bytes per block, KV bytes per token), by the server before it loads a span, and by the tests. Knows
no addresses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modelswarm.checkpoint.block_tensors import (
    STORED_DTYPES,
    TensorPlan,
    check_block_count,
    check_tensors,
    plan_tensors,
)
from modelswarm.checkpoint.config.config_checks import check_config
from modelswarm.checkpoint.families.family import LLAMA_TABLES, Tables
from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.checkpoint.json_files import read_json
from modelswarm.checkpoint.tensor_index import TensorEntry, read_names, read_tensors
from modelswarm.checkpoint.tensor_names import MAX_BLOCKS, ModelPart, block_of
from modelswarm.errors import ModelSourceError, UserError

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Names of the number formats a span can run in, and their bytes."""
CONFIG_FILE = "config.json"


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
        return ModelPart(first, last, self.n_blocks, self.tied, tables_of(self.family))

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
    smaller_elements: int = 0  # of each of `smaller_blocks`
    smaller_blocks: tuple[
        int, ...
    ] = ()  # of the other kind: those without experts, if others have some

    def span_elements(self, first: int, last: int) -> int:
        """Return the elements of blocks [first, last)."""
        smaller = self._smaller_in(first, last)
        return (last - first - smaller) * self.block_elements + smaller * self.smaller_elements

    def largest_block(self, first: int, last: int) -> int:
        """Return the elements of the largest of blocks [first, last)."""
        has_largest = self._smaller_in(first, last) < last - first
        return self.block_elements if has_largest else self.smaller_elements

    def _smaller_in(self, first: int, last: int) -> int:
        """Return how many of blocks [first, last) are smaller ones."""
        return sum(first <= block < last for block in self.smaller_blocks)

    def weight_bytes(self, first: int, last: int, dtype: str) -> int:
        """Return the weights of a server that holds blocks [first, last), in bytes."""
        part = self.config.part(first, last)
        tables = int(part.is_head) + int(part.is_tail)
        if self.config.tied and part.is_head and part.is_tail:
            tables = 1
        elements = self.span_elements(first, last) + tables * self.embedding_elements
        return elements * DTYPES[dtype]

    def read_bytes(self, first: int, last: int, dtype: str) -> int:
        """Return the weights that a step of blocks [first, last) reads, in bytes per block on average.

        A tail reads the output head, too. Of the embedding a step reads a few rows; of a MoE block all experts count.
        """
        elements = self.span_elements(first, last)
        if self.config.part(first, last).is_tail:
            elements += self.embedding_elements
        return elements // (last - first) * DTYPES[dtype]

    def kv_bytes(self, dtype: str) -> int:
        """Return the KV bytes of one position in one block."""
        return self.kv_elements * DTYPES[dtype]

    def row_bytes(self, dtype: str) -> int:
        """Return the bytes of one row at a block boundary."""
        return self.config.hidden * DTYPES[dtype]


def tables_of(family: str) -> Tables:
    """Return the names of a family's tables."""
    return next((each.tables for each in FAMILIES.values() if each.name == family), LLAMA_TABLES)


def read_config(folder: Path) -> ModelConfig:
    """Read config.json; refuse a missing folder and a model that cannot be served."""
    return read_config_and_plan(folder)[0]


def read_facts(folder: Path, blocks: tuple[int, int] | None = None) -> ModelFacts:
    """Read the facts of a checkpoint folder. With `blocks`, only the shards of this span must be present."""
    config, plan = read_config_and_plan(folder)
    check_block_count(config.n_blocks, read_names(folder), folder / CONFIG_FILE, plan.spare_blocks)
    part = config.all_blocks if blocks is None else config.part(*blocks)
    return facts_from_tensors(config, plan, part, read_tensors(folder, part.needs_tensor), folder)


def facts_from_tensors(
    config: ModelConfig,
    plan: TensorPlan,
    part: ModelPart,
    tensors: Mapping[str, TensorEntry],
    label: Path | str,
) -> ModelFacts:
    """Return the facts from the headers of the part's tensors; errors call the model `label`."""
    check_tensors(plan, part, tensors, label)
    sizes = plan.block_sizes(config.n_blocks)
    largest = max(sizes)
    smaller = tuple(block for block, size in enumerate(sizes) if size < largest)
    return ModelFacts(
        config=config,
        dtype=_stored_dtype(tensors, part),
        block_elements=largest,
        embedding_elements=plan.table_elements(),
        kv_elements=plan.kv_elements,
        smaller_elements=min(sizes) if smaller else 0,
        smaller_blocks=smaller,
    )


def read_config_and_plan(folder: Path) -> tuple[ModelConfig, TensorPlan]:
    """Read config.json as `read_config` does; return the tensors too that it asks for."""
    if not folder.is_dir():
        raise ModelSourceError("model", f"{folder} is not a folder")
    path = folder / CONFIG_FILE
    config = read_json(path)
    fields = check_config(config, path)
    family, text = fields.family, fields.values
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", family.tied))
    found = ModelConfig(
        family=family.name,
        n_blocks=fields.integer("num_hidden_layers"),
        hidden=fields.integer("hidden_size"),
        vocab=fields.integer("vocab_size"),
        context=fields.integer("max_position_embeddings"),
        tied=bool(tied),
    )
    if found.n_blocks > MAX_BLOCKS:
        fields.refuse("num_hidden_layers", found.n_blocks, f"allowed are at most {MAX_BLOCKS}")
    return found, plan_tensors(fields)


def _stored_dtype(tensors: Mapping[str, TensorEntry], part: ModelPart) -> str:
    """Return the format in which most elements of the part's blocks are stored."""
    sizes: Counter[str] = Counter()
    for name, entry in tensors.items():
        if block_of(name) in range(part.first, part.last) and entry.dtype in STORED_DTYPES:
            sizes[entry.dtype] += math.prod(entry.shape)
    return STORED_DTYPES[sizes.most_common(1)[0][0]]
