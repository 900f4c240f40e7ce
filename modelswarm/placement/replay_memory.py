"""Host memory of the replay log (R6, replay), from which a lost neighbour of a server is rebuilt.

Used by the plan and by servers, so that both compute the same. Pure; knows no plans.
"""

from __future__ import annotations

GROUP_OVERHEAD = 160
"""Bytes that one group of rows takes beside its rows: the buffer's header, its list entries, two numbers."""


def replay_bytes(row_bytes: int, positions: int) -> int:
    """Return the bytes of one row per position of KV, each in a buffer of its own, as decode steps make them."""
    return (row_bytes + GROUP_OVERHEAD) * positions
