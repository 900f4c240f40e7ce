"""Which part of a model a tensor belongs to, judged by its name.

Used to download only the needed shards, to load only the needed tensors and to weigh spans. Knows the naming of
the supported families (Llama-shaped names, possibly nested under `language_model`), nothing of files or torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_BLOCK = re.compile(r"^model\.layers\.(\d+)\.")


def canonical(name: str) -> str | None:
    """The tensor's name in the causal language model, or None for what a text model does not have.

    Gemma 3 checkpoints with a vision tower nest the language model, older ones as `language_model.model.…`, newer
    ones as `model.language_model.…`.
    """
    if name.startswith("language_model."):
        name = name.removeprefix("language_model.")
    elif name.startswith("model.language_model."):
        name = "model." + name.removeprefix("model.language_model.")
    return name if name in (EMBEDDING, NORM, HEAD) or _BLOCK.match(name) else None


def block_of(name: str) -> int | None:
    """The block a canonical name belongs to; None for embedding, norm and head."""
    match = _BLOCK.match(name)
    return int(match.group(1)) if match else None


@dataclass(frozen=True, slots=True)
class Part:
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
    def tables(self) -> frozenset[str]:
        """What is needed beside the blocks."""
        names = {EMBEDDING} if self.needs_embedding else set()
        if self.is_tail:
            names |= {NORM} if self.tied else {NORM, HEAD}
        return frozenset(names)

    def needs(self, name: str) -> bool:
        """Whether a canonical name is loaded for this part."""
        block = block_of(name)
        return name in self.tables if block is None else self.first <= block < self.last
