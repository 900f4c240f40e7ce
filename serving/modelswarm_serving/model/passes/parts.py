"""The parts of a pass: neighbouring rows of some sequences, and their attention to the rows before them.

`transformer_pass.py` runs a block part by part, so that no part is larger than a step of the engine. Keys and values of
earlier parts are leaves of the graph: a backward pass gets their gradients from each later part, and adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelswarm_serving.model.attention.attention import attend_keys
from modelswarm_serving.model.attention.backend import Scoring
from modelswarm_serving.model.attention.step_layout import (
    AttentionGroup,
    TileBatch,
    prefill_mask,
    visible_keys,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, first + count) of one sequence."""

    sequence: int  # place of the sequence's first row in the pass
    first: int
    count: int

    @property
    def before(self) -> slice:
        """Places of the sequence's rows before the piece."""
        return slice(self.sequence, self.sequence + self.first)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, end) of the pass, in pieces."""

    start: int
    end: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> slice:
        return slice(self.start, self.end)


def split_parts(lengths: Sequence[int], most: int) -> list[Part]:
    """Return the rows of all sequences, one after the other, as parts of at most so many rows."""
    parts: list[Part] = []
    pieces: list[Piece] = []
    start = at = sequence = 0
    for length in lengths:
        first = 0
        while first < length:
            count = min(length - first, start + most - at)
            pieces.append(Piece(sequence, first, count))
            first, at = first + count, at + count
            if at == start + most:
                parts.append(Part(start, at, tuple(pieces)))
                pieces, start = [], at
        sequence += length
    if pieces:
        parts.append(Part(start, at, tuple(pieces)))
    return parts


class PartLayout:
    """The rows of a part as blocks see them (`RowLayout`). They have no slots: nothing is written to pages."""

    def __init__(self, part: Part, device: torch.device) -> None:
        positions = [
            position
            for piece in part.pieces
            for position in range(piece.first, piece.first + piece.count)
        ]
        self.positions = torch.tensor(positions, device=device)
        self.max_position = max(positions)

    @property
    def slots(self) -> Tensor:
        raise RuntimeError("the rows of a pass have no slots")

    def pick_positions(self, table: Tensor) -> Tensor:
        return table.index_select(0, self.positions)

    def tile_batches(self, rows_each: int) -> list[TileBatch]:
        raise RuntimeError(f"the rows of a pass have no tiles of {rows_each}")


@dataclass(slots=True)
class PartAttention:
    """Attention of one part in one block: over the keys of earlier parts, and its own.

    `past`: keys and values of the rows before each piece, [rows, 1 or 2, kv_heads, D]; None for a piece without any.
    """

    part: Part
    past: Sequence[Tensor | None]
    fresh: list[Tensor] = field(
        default_factory=list
    )  # keys and values of the part's rows, once they are known

    def attend_rows(self, query: Tensor, fresh: Tensor, scoring: Scoring) -> Tensor:
        """Return [T, heads, D], as `attention.attend` does."""
        self.fresh.append(fresh)
        outputs, at = [], 0
        for piece, past in zip(self.part.pieces, self.past, strict=True):
            rows = slice(at, at + piece.count)
            keys = fresh[rows] if past is None else torch.cat((past, fresh[rows]))
            outputs.append(_attend_piece(piece, query[rows], keys, scoring))
            at += piece.count
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_piece(piece: Piece, query: Tensor, keys: Tensor, scoring: Scoring) -> Tensor:
    count, end, window = piece.count, piece.first + piece.count, scoring.window
    length = visible_keys(end, None if window is None else window + count - 1)
    keys = keys[end - length :]
    k, v = (part.transpose(0, 1).unsqueeze(0) for part in (keys[:, 0], keys[:, -1]))
    mask = prefill_mask(piece.first, count, length, window, query.device, query.dtype)
    group = AttentionGroup(0, 1, count, length, slice(0, length), mask, causal=mask is None)
    return attend_keys(group, query, k, v, scoring)
