"""Opaque entries of an input log (R14): rows that stand in place of a token's embedding.

In a log such an entry is a number above all tokens, made of a hash of its row; the row travels beside it. Used by
gateways, which log the rows, and by servers, which keep them with their log copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

OPAQUE = 1 << 31
"""The lowest opaque entry. No vocabulary is that large, and all entries fit into 32 bits."""


def is_opaque(entry: int) -> bool:
    return entry >= OPAQUE


def opaque_entries(rows: bytes, row_bytes: int) -> tuple[int, ...]:
    """Return the log entries of rows of `row_bytes` each."""
    return tuple(
        OPAQUE | int.from_bytes(hashlib.blake2s(rows[at : at + row_bytes]).digest()[:4]) >> 1
        for at in range(0, len(rows), row_bytes)
    )


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
