"""The card of one model: its state as the gateway serves it.

Made by the node, read by the service, the APIs and the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm_gateway.models.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model as the gateway serves it."""

    name: str
    revision: str
    n_blocks: int
    missing_blocks: tuple[int, ...]  # blocks without a server
    max_length: int  # positions of the context; 0: not known now
    tokenizer: ModelTokenizer | None  # None: its files have not arrived yet
    known_since: int  # unix seconds

    @property
    def ready(self) -> bool:
        return self.tokenizer is not None and not self.missing_blocks and self.n_blocks > 0
