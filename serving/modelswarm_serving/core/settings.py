"""What an operator may turn in the server core; filled by the process's own settings, never read from the environment.

Used by `server.py` and by the shell that builds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm.protocol.identity import Address


@dataclass(frozen=True, slots=True)
class ServerSettings:
    address: Address  # this server; what it sends to itself never reaches a link
    grant_seconds: float = 5.0  # a created hop without Go is freed after this (R12)
    lease_seconds: float = 30.0  # R19: freed without its gateway, under pressure after 1x, else 2x
    recovery_fraction: float = 0.1  # of the pages, which only repairs may take (R12)
    token_budget: int = 512  # rows per step
    row_window: int = 1024  # rows a predecessor may be ahead of what is applied (R11)
    in_flight_bytes: int = 32 << 20  # of rows that one peer may have to send here on bulk (R12)
    replay_bytes: int = 256 << 20  # of host memory for kept rows (R6); 0: none are kept
    transfer_rate: int = (
        0  # bytes per second of copies (R13) while sessions decode here; 0: no limit
    )


TRANSFER_RATE = 32 << 20
"""Bytes per second of copies where sessions decode. What that costs two processes (read, packed, sent, unpacked and
written: some 0.5 ms of a core for 128 KiB) the rows of sessions hardly notice; of twice as much they do."""

TRANSFER_WINDOW_BYTES = 4 << 20
"""Of KV that may wait at a copy, or be on its way there."""

ROW_WINDOW_BYTES = 2 << 20
MIN_ROW_WINDOW, MAX_ROW_WINDOW = 32, 1024


def row_window(row_bytes: int) -> int:
    """Rows of one session that may wait here or on their way here: about 2 MiB, so that many long prompts at once do
    not fill the queue of the link they come over."""
    return max(MIN_ROW_WINDOW, min(MAX_ROW_WINDOW, ROW_WINDOW_BYTES // row_bytes))
