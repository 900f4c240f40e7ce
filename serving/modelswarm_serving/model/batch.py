"""One step's layout: which rows of the packed batch belong to which sequence, and where their KV lies.

Built once per step from plain Work, so that no block has to look at Python lists again. `attention.py` asks for the
pieces of a window size; everything index-like is a tensor by then. Knows nothing of models or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modelswarm_serving.model.base import Work
from modelswarm_serving.model.pool import PagePool

GATHER_LIMIT = 2 * 1024 * 1024
GATHER_LIMIT_EACH = 96 * 1024
"""Bytes of padded keys per block, in all and per sequence, up to which decode rows attend as one gathered batch; above
they attend one by one, mostly on views. Measured with 2, 8 and 32 sequences of 64 to 1024 positions (AVX-512 Xeon):
the two cost the same near these limits, and one by one is up to twice as fast beyond."""


@dataclass(frozen=True, slots=True)
class Sequence_:
    """A Work in the packed batch."""

    row: int  # its first row there
    first: int  # position of that row
    count: int
    slots: slice | torch.Tensor  # slots of its positions [0, first + count), in order


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that attend in one call: `n` sequences of `count` rows each, over `length` keys each."""

    start: int  # rows [start, start + n * count) of the batch
    n: int
    count: int
    length: int
    where: slice | torch.Tensor  # n * length slots
    mask: torch.Tensor | None  # additive, [n, 1, count, length]; None: every key counts
    causal: bool = False  # rows start at key 0: the plain triangle


class Batch:
    """Packed rows of one step; single rows first, so that decode is one run of rows."""

    def __init__(self, works: Sequence[Work], pool: PagePool) -> None:
        self.works = sorted(works, key=lambda work: work.count > 1)
        self._key_bytes = pool.key_bytes
        self._dtype = pool.keys[0].dtype
        self._device = device = pool.keys[0].device
        self.sequences = _lay_out(self.works, pool.shape.page_size, device)
        self.highest = max(work.first + work.count for work in works) - 1  # position
        self.rows = sum(work.count for work in self.works)
        self.positions = torch.tensor(
            [p for w in self.works for p in range(w.first, w.first + w.count)], device=device
        )
        self.slots = torch.cat([_tail(s, device) for s in self.sequences])
        self._pieces: dict[int | None, list[Piece]] = {}

    def pieces(self, window: int | None) -> list[Piece]:
        """How the rows attend in blocks with this sliding window (None: full attention)."""
        if window not in self._pieces:
            self._pieces[window] = self._cut(window)
        return self._pieces[window]

    def _cut(self, window: int | None) -> list[Piece]:
        singles = [s for s in self.sequences if s.count == 1]
        chunks = [s for s in self.sequences if s.count > 1]
        pieces = self._decode(singles, window)
        pieces.extend(_chunk(s, window, self._dtype, self._device) for s in chunks)
        return pieces

    def _decode(self, singles: list[Sequence_], window: int | None) -> list[Piece]:
        if not singles:
            return []
        lengths = [_visible(s.first + 1, window) for s in singles]
        longest = max(lengths)
        n = len(singles)
        limit = min(GATHER_LIMIT, n * GATHER_LIMIT_EACH)
        if n == 1 or n * longest * self._key_bytes > limit:
            return [
                Piece(s.row, 1, 1, length, _last(s.slots, s.first + 1, length), None)
                for s, length in zip(singles, lengths, strict=True)
            ]
        where = torch.zeros(n, longest, dtype=torch.long, device=self._device)
        mask = torch.zeros(n, 1, 1, longest, dtype=self._dtype, device=self._device)
        for i, (s, length) in enumerate(zip(singles, lengths, strict=True)):
            where[i, :length] = _indices(_last(s.slots, s.first + 1, length), self._device)
            where[i, length:] = where[i, 0]  # any slot of its own: finite, and masked
            mask[i, :, :, length:] = float("-inf")
        return [Piece(singles[0].row, n, 1, longest, where.view(-1), mask)]


def _lay_out(works: Sequence[Work], page_size: int, device: torch.device) -> list[Sequence_]:
    sequences: list[Sequence_] = []
    row = 0
    for work in works:
        slots = _slots(work.pages, work.first + work.count, page_size, device)
        sequences.append(Sequence_(row, work.first, work.count, slots))
        row += work.count
    return sequences


def _slots(
    pages: Sequence[int], length: int, page_size: int, device: torch.device
) -> slice | torch.Tensor:
    """Slots of positions [0, length): a slice when the pages are neighbours, so that nothing is gathered."""
    used = -(-length // page_size)
    start = pages[0]
    if all(pages[i] == start + i for i in range(used)):
        return slice(start * page_size, start * page_size + length)
    table = torch.tensor(pages[:used], device=device)
    offsets = torch.arange(page_size, device=device)
    return (table[:, None] * page_size + offsets).view(-1)[:length]


def _visible(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)


def _last(slots: slice | torch.Tensor, length: int, count: int) -> slice | torch.Tensor:
    """The last `count` of `length` slots."""
    if isinstance(slots, slice):
        return slice(slots.start + length - count, slots.stop)
    return slots[length - count :]


def _indices(slots: slice | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(slots, slice):
        return torch.arange(slots.start, slots.stop, device=device)
    return slots


def _tail(sequence: Sequence_, device: torch.device) -> torch.Tensor:
    """Slots of the sequence's own rows of this step."""
    end = sequence.first + sequence.count
    return _indices(_last(sequence.slots, end, sequence.count), device)


def _chunk(s: Sequence_, window: int | None, dtype: torch.dtype, device: torch.device) -> Piece:
    """Prefill rows of one sequence: each sees the keys up to itself, at most `window` of them."""
    end = s.first + s.count
    length = _visible(end, None if window is None else window + s.count - 1)
    where = _last(s.slots, end, length)
    if length == s.count and (window is None or s.count <= window):
        return Piece(s.row, 1, s.count, length, where, None, causal=True)
    queries = torch.arange(s.first, end, device=device)[:, None]
    keys = torch.arange(end - length, end, device=device)[None, :]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    mask = torch.zeros(s.count, length, dtype=dtype, device=device)
    mask.masked_fill_(hidden, float("-inf"))
    return Piece(s.row, 1, s.count, length, where, mask[None, None])
