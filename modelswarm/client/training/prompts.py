"""Soft prompts: rows that are trained at the client, and stand before the tokens of every input.

With "ptune" they are in place of embeddings. With "deep_ptune" there are also rows of each block, which are added to
those of the soft prompt before the block. Names are those of Petals.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

TuningMode: TypeAlias = Literal["ptune", "deep_ptune"]
NAMES = ("prompt_embeddings", "intermediate_prompt_embeddings")


class SoftPrompts(nn.Module):
    """The trainable rows, in float32, drawn as the model's own embeddings were."""

    def __init__(
        self, mode: TuningMode, rows: int, hidden: int, blocks: int, deviation: float
    ) -> None:
        """`deviation`: standard deviation of the first values."""
        super().__init__()
        self.mode, self.rows = mode, rows
        self._blocks, self._hidden = blocks, hidden
        self.prompt_embeddings = nn.Embedding(rows, hidden, dtype=torch.float32)
        nn.init.normal_(self.prompt_embeddings.weight, std=deviation)
        if mode == "deep_ptune":
            size = blocks * hidden
            self.intermediate_prompt_embeddings = nn.Embedding(rows, size, dtype=torch.float32)
            nn.init.normal_(self.intermediate_prompt_embeddings.weight, std=deviation)

    @property
    def first(self) -> Tensor:
        """Rows before the tokens, [rows, hidden]."""
        return self.prompt_embeddings.weight

    @property
    def deep(self) -> Tensor | None:
        """Rows of each block, [blocks, rows, hidden]; None with "ptune"."""
        if self.mode != "deep_ptune":
            return None
        weight = self.intermediate_prompt_embeddings.weight
        return weight.view(self.rows, self._blocks, self._hidden).transpose(0, 1)

    def extra_repr(self) -> str:
        return f"{self.mode}, {self.rows} rows"
