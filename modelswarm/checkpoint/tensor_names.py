"""Names of tensors: the block, embedding, norm or head that a tensor belongs to.

Used to download only the needed shards, to load only the needed tensors and to compute sizes. Knows the naming of the
supported families (Llama-shaped names, possibly nested under `language_model`), nothing of files or torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

MAX_BLOCKS = 4096
"""Most blocks of a model: documents, inspections and gateways refuse more. The deepest models have a few hundred."""

_BLOCK = re.compile(r"^model\.layers\.(\d+)\.")


def canonical_name(name: str) -> str | None:
    """Return the tensor's name in the causal language model; None if a text model has no such tensor.

    Gemma 3 checkpoints with a vision tower nest the language model, older ones as `language_model.model.…`, newer
    ones as `model.language_model.…`.
    """
    if name.startswith("language_model."):
        name = name.removeprefix("language_model.")
    elif name.startswith("model.language_model."):
        name = "model." + name.removeprefix("model.language_model.")
    return name if name in (EMBEDDING, NORM, HEAD) or _BLOCK.match(name) else None


def block_of(name: str) -> int | None:
    """Return the block of a canonical name; None for embedding, norm and head."""
    match = _BLOCK.match(name)
    return int(match.group(1)) if match else None


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Blocks [first, last) of n_blocks, with embedding and head where the span has them."""

    first: int
    last: int
    n_blocks: int
    tied: bool = False  # the head's weight is the embedding's

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
        names = {EMBEDDING} if self.needs_embedding else set()
        if self.is_tail:
            names |= {NORM} if self.tied else {NORM, HEAD}
        return frozenset(names)

    def needs_tensor(self, name: str) -> bool:
        """True if the tensor of a canonical name is loaded for this part."""
        block = block_of(name)
        return name in self.table_names if block is None else self.first <= block < self.last
