"""Settings of the server core, filled from the process's own settings and never read from the environment.

Used by `server.py` and by the shell that builds it. Knows no flags.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm.protocol.identity import Adapter, Address


@dataclass(frozen=True, slots=True)
class ServerSettings:
    address: Address  # this server; messages to itself never reach a link
    adapters: frozenset[Adapter] = frozenset()  # that sessions may name
    grant_seconds: float = 5.0  # a new hop without StartEpoch is freed after this (R12, admission)
    lease_seconds: float = (
        30.0  # R19 (leases): freed without its gateway after 2x, for new hops after 1x
    )
    recovery_fraction: float = 0.1  # share of the pages for recoveries only (R12, admission)
    token_budget: int = 512  # rows per step
    pipeline_rows: int = 256  # of a new prompt in a step, where its route has several hops
    row_window: int = 1024  # rows a predecessor may send beyond the applied ones (R11, windows)
    in_flight_bytes: int = 32 << 20  # bytes of rows in flight here from one peer (R11, windows)
    replay_bytes: int = 256 << 20  # host memory of the replay log (R6, replay); 0: no replay log
    fork_step_bytes: int = 8 << 20  # KV that one step copies for forks: 3 ms in a host's memory
    transfer_rate: int = 0  # bytes/s of KV transfers (R13, migration) during decoding; 0: no limit


TRANSFER_RATE = 32 << 20
"""Bytes per second of KV transfers where sessions decode. 128 KiB cost the two processes some 0.5 ms of a core (read,
pack, send, unpack, write). At this rate the rows of sessions are hardly delayed; at twice the rate they are."""

TRANSFER_WINDOW_BYTES = 4 << 20
"""Bytes of KV that may wait at the receiver of a transfer or be in flight to it."""

ROW_WINDOW_BYTES = 4 << 20
MIN_ROW_WINDOW, MAX_ROW_WINDOW = 32, 1024
PIPELINE_ROWS = 256


def row_window(row_bytes: int) -> int:
    """Return the rows of one session that may wait here or be in flight: about 4 MiB.

    So many long prompts at once do not fill the queue of their link.
    """
    return max(MIN_ROW_WINDOW, min(MAX_ROW_WINDOW, ROW_WINDOW_BYTES // row_bytes))


def pipeline_rows(window: int) -> int:
    """Return the rows of a new prompt in a step, where its route has several hops.

    Two steps must fit into the window, or a hop waits while the next one computes. Measured with 2,048 tokens of a 246M
    model, two hops over one: 0.98 times as fast in steps of a whole window (512 rows). Steps of 256 rows were 1.62
    times as fast, of 128 rows 1.66 times.
    """
    return max(1, min(PIPELINE_ROWS, window // 2))
