"""Host memory for the rows that a server keeps so that a lost neighbour can be rebuilt (the replay log, R6).

Used by the plan and by servers, so that a server takes what its plan counted. Pure.
"""

from __future__ import annotations

GROUP_OVERHEAD = 160
"""Bytes that one group of rows takes beside them: the head of the buffer, its places in the lists, two numbers."""


def replay_bytes(row_bytes: int, positions: int) -> int:
    """For a row of every position that there is KV for, each in a buffer of its own, as decode makes them."""
    return (row_bytes + GROUP_OVERHEAD) * positions
