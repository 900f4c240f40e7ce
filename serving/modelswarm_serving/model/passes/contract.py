"""The contract between the calls for passes and a model that computes them.

A pass runs whole sequences through some blocks, without KV pages and without a session. A backward pass computes the
forward pass again, because servers keep nothing between two calls. `runtime/passes/` admits passes by their memory and
runs them in parts. `transformer_pass.py` computes. Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from modelswarm_serving.model.base import ModelShape

# Rows of one block that a part of a pass runs: with gradients about the work of three times as many rows of a step.
PART_ROWS = 128


@dataclass(frozen=True, slots=True)
class PassTask:
    """One pass: the input has the rows, then the prompts, and for a backward pass the gradients of the output rows."""

    blocks: tuple[int, int]  # absolute; within the model's own span
    lengths: tuple[int, ...]  # rows of each sequence
    # Rows that are added to the first ones of each sequence before each block: [blocks, prompt_rows]. 0: none.
    prompt_rows: int = 0
    is_backward: bool = False

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    @property
    def prompts(self) -> int:
        """Rows of all prompts."""
        return (self.blocks[1] - self.blocks[0]) * self.prompt_rows

    def input_bytes(self, shape: ModelShape) -> int:
        return ((1 + self.is_backward) * self.rows + self.prompts) * shape.row_bytes

    def memory(self, shape: ModelShape) -> int:
        """Return the bytes that the pass takes beside the activations of one part.

        A forward pass counts as its backward pass, so that the latter fits, too. Rows and KV of each block are kept:
        both are input of the way back. Two more of each are gradients, in float32 for KV; the rest is input and result.
        """
        blocks = self.blocks[1] - self.blocks[0]
        kept = blocks * (shape.row_bytes + shape.kv_bytes)
        return self.rows * (kept + 6 * shape.row_bytes + 3 * shape.kv_bytes) + (
            3 * self.prompts * shape.row_bytes
        )


class RunningPass(Protocol):
    def advance(self) -> bool:
        """Compute the next part; return True after the last one. Called by the engine's thread."""
        ...

    def result(self) -> bytes:
        """Return the result of a pass that is complete."""
        ...


class PassRunner(Protocol):
    """A model that computes passes."""

    def start_pass(
        self, task: PassTask, data: bytes | bytearray, part_rows: int = PART_ROWS
    ) -> RunningPass:
        """Return the pass, of which nothing is computed yet. A part has at most `part_rows` rows of one block."""
        ...
