"""Opaque entries of an input log (R14): rows that stand in place of a token's embedding.

In a log such an entry is a number above all tokens, made of a hash of its row; the row travels beside it. Used by
gateways, which log the rows, and by servers, which keep them with their log copies.

The rows of the first `Turn.prompt_rows` entries are chains: the row in place of the embedding, then one for each block.
The block adds it to the row of that position (deep prompt tuning).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

OPAQUE = 1 << 31
"""The lowest opaque entry. No vocabulary is that large, and all entries fit into 32 bits."""


def is_opaque(entry: int) -> bool:
    return entry >= OPAQUE


def opaque_entries(rows: Iterable[bytes]) -> tuple[int, ...]:
    """Return the log entries of rows."""
    return tuple(OPAQUE | int.from_bytes(hashlib.blake2s(row).digest()[:4]) >> 1 for row in rows)


def chain_bytes(row_bytes: int, n_blocks: int) -> int:
    """Return the bytes of a row with those of all blocks."""
    return row_bytes * (1 + n_blocks)


def block_rows(chain: bytes, row_bytes: int, first: int, last: int) -> bytes:
    """Return the rows of blocks [first, last) of a chain."""
    return chain[row_bytes * (1 + first) : row_bytes * (1 + last)]


def split_rows(start: int, entries: Sequence[int], rows: bytes) -> dict[int, bytes] | None:
    """Return the rows of the opaque ones of log entries [start, ...), by position.

    None if they cannot be divided equally among these entries.
    """
    places = [at for at, entry in enumerate(entries, start) if is_opaque(entry)]
    if not places:
        return None if rows else {}
    size, rest = divmod(len(rows), len(places))
    if rest or not size:
        return None
    return {at: bytes(rows[i * size : (i + 1) * size]) for i, at in enumerate(places)}


def join_rows(rows: Mapping[int, bytes], start: int, end: int) -> bytes:
    """Return the rows at positions [start, end), one after the other."""
    if not rows:
        return b""
    return b"".join(rows[at] for at in range(start, end) if at in rows)


def without_opaque(entries: Iterable[int]) -> tuple[int, ...]:
    """Return the tokens among the entries."""
    return tuple(entry for entry in entries if entry < OPAQUE)


def split_entries(
    start: int, end: int, opaque: Mapping[int, bytes], most: int, most_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield ranges of log entries [start, end), one for each message.

    Each has at most `most` entries, and as far as there are rows, about `most_bytes` of these.
    """
    behind = max(opaque, default=-1) + 1
    few = max(1, min(most, most_bytes // max(map(len, opaque.values()), default=1)))
    while start < end:
        stop = min(end, start + most) if start >= behind else min(end, behind, start + few)
        yield start, stop
        start = stop
