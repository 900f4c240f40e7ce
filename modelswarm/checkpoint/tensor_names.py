"""Names of tensors: the block, embedding, norm or head that a tensor belongs to.

Used to download only the needed shards, to load only the needed tensors and to compute sizes. The names themselves are
in the table of families. Knows nothing of files or torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from modelswarm.checkpoint.families.family import LLAMA_TABLES, Tables
from modelswarm.checkpoint.families.table import FAMILIES

MAX_BLOCKS = 4096
"""Most blocks of a model: documents, inspections and gateways refuse more. The deepest models have a few hundred."""

_TABLES = frozenset(name for family in FAMILIES.values() for name in family.tables.names)
_LISTS = {family.tables.blocks for family in FAMILIES.values()}
_BLOCK = re.compile(
    rf"^(?:{'|'.join(re.escape(name) for name in sorted(_LISTS))})\.([0-9]{{1,9}})\."
)
_BASES = ("model.", "transformer.")
"""Beginnings of names that a checkpoint of the base model leaves out, as those of GPT-2, BLOOM and OPT do."""


def canonical_name(name: str) -> str | None:
    """Return the tensor's name in the causal language model; None if a text model has no such tensor.

    Gemma 3 checkpoints with a vision tower nest the language model, older ones as `language_model.model.…`, newer
    ones as `model.language_model.…`.
    """
    if name.startswith("language_model."):
        name = name.removeprefix("language_model.")
    elif name.startswith("model.language_model."):
        name = "model." + name.removeprefix("model.language_model.")
    names = (name, *(base + name for base in _BASES))
    return next((each for each in names if each in _TABLES or _BLOCK.match(each)), None)


def block_of(name: str) -> int | None:
    """Return the block of a canonical name; None for embedding, norm and head."""
    match = _BLOCK.match(name)
    return int(match.group(1)) if match else None


def name_in_block(name: str) -> str:
    """Return the rest of the canonical name of a block's tensor."""
    return _BLOCK.sub("", name)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Blocks [first, last) of n_blocks, with embedding and head where the span has them."""

    first: int
    last: int
    n_blocks: int
    tied: bool = False  # the head's weight is the embedding's
    tables: Tables = LLAMA_TABLES

    @property
    def is_head(self) -> bool:
        return self.first == 0

    @property
    def is_tail(self) -> bool:
        return self.last == self.n_blocks

    @property
    def needs_embedding(self) -> bool:
        return self.is_head or (self.is_tail and self.tied)

    @property
    def table_names(self) -> frozenset[str]:
        """Names of the tensors needed beside the blocks."""
        tables = self.tables
        names = set(tables.head_names) if self.is_head else set()
        if self.is_tail:
            names |= {*tables.norm, tables.embedding if self.tied else tables.head}
        return frozenset(names)

    @property
    def twin(self) -> str | None:
        """Name of a tensor that the files may hold beside its equal, which is loaded: the head's in a tied tail."""
        return self.tables.head if self.is_tail and self.tied else None

    def needs_tensor(self, name: str) -> bool:
        """True if the tensor of a canonical name is read for this part."""
        block = block_of(name)
        if block is None:
            return name in self.table_names or name == self.twin
        return self.first <= block < self.last
