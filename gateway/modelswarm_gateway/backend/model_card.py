"""The card of one model: its state as the gateway serves it.

Made by the node, read by the service, the APIs and the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm.placement.spans import format_blocks
from modelswarm.process.start_progress import StartPhase
from modelswarm_gateway.core.interface.row_sizes import NO_ROWS, RowSizes
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
    files_phase: StartPhase = (
        StartPhase.TOKENIZER
    )  # what is made of its files while there is no tokenizer
    files_problem: str = ""  # why its tokenizer files cannot be used
    files_wait: str = ""  # what the tokenizer waits for, if that is known
    # Library and version of the grammars of each server that samples; empty: it has none.
    grammar_versions: frozenset[str] = frozenset()
    rows: RowSizes = NO_ROWS  # of logits and hidden states that its servers return
    boundary_rows: RowSizes = NO_ROWS  # between blocks; none if a server runs no range of them
    takes_block_rows: bool = False  # all its servers add rows inside of their blocks
    parent: str = ""  # the model that it is an adapter of; empty: it is a model

    @property
    def ready(self) -> bool:
        return self.tokenizer is not None and self._has_servers

    @property
    def _has_servers(self) -> bool:
        return not self.missing_blocks and self.n_blocks > 0

    @property
    def can_constrain(self) -> bool:
        """Return whether some server can hold an answer to a grammar; True while that is not known."""
        return not self.grammar_versions or any(self.grammar_versions)

    @property
    def phase(self) -> StartPhase:
        if self.ready:
            return StartPhase.READY
        return self.files_phase if self._has_servers else StartPhase.LINKING

    @property
    def reason(self) -> str:
        """Reason for which the model is not ready, in words for users; empty when it is."""
        reasons = []
        if self.n_blocks == 0:
            reasons.append("no server has been linked yet")
        elif self.missing_blocks:
            reasons.append(f"no server for blocks {format_blocks(self.missing_blocks)}")
        if self.tokenizer is None and self.n_blocks > 0:
            reasons.append(self.tokenizer_reason)
        return "; ".join(reasons)

    @property
    def tokenizer_reason(self) -> str:
        """Reason for which there is no tokenizer."""
        if self.files_problem:
            return f"its tokenizer files cannot be used: {self.files_problem}"
        return self.files_wait or "its tokenizer is not loaded yet"

    @property
    def is_loading_tokenizer(self) -> bool:
        """Return whether its tokenizer is to come from a connected server, and no earlier try has failed."""
        is_connected = len(self.missing_blocks) < self.n_blocks
        return self.tokenizer is None and is_connected and not self.files_problem

    @property
    def vocabulary(self) -> int:
        """Return the number that all token ids are below; 0: not known yet."""
        return 0 if self.tokenizer is None else self.tokenizer.vocabulary

    @property
    def chat_problem(self) -> str:
        """Reason for which chats are refused; empty if they are not, or not yet known."""
        return "" if self.tokenizer is None else self.tokenizer.chat_fault
