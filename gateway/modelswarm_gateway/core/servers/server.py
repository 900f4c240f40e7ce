"""One server as this gateway sees it: its Hello, its last heartbeat, the load placed since, and its cost inputs.

Kept by `server_registry.py`, read by `cost_model.py`. Pure. Knows no other servers: the median block time among them is
a parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from modelswarm.protocol.identity import Address
from modelswarm.protocol.messages import Heartbeat, Hello

Floats = npt.NDArray[np.float64]

# Time in ms of a block, as long as no server has run a step.
DEFAULT_BLOCK_MS = 1.0
# Time in ms that a hop costs an idle server besides its blocks.
HOP_OVERHEAD_MS = 0.5
# Each additional SESSIONS_PER_STEP sessions lengthen the assumed step time by that of an idle server.
SESSIONS_PER_STEP = 2.0
# Number of rows to prefill or replay that count as one more session.
ROWS_PER_SESSION = 512
# Time constant in seconds with which the step time of an idle server fades into the median.
IDLE_DECAY_SECONDS = 10.0
# Difference of round trips in ms below which two servers count as equally near.
RTT_NOISE_MS = 1.0
# Share of the difference by which a longer round trip raises the estimate.
RTT_RISE = 0.02
# Least predicted wait in ms for KV that is not free.
MIN_KV_WAIT_MS = 2_500.0
# Additional predicted wait in ms for as many pages as the server has.
FULL_KV_WAIT_MS = 10_000.0
# Share of a server's pages that is reserved for recovery (R12, admission).
RECOVERY_RESERVE = 0.1
# Greatest accepted ratio of the median block time to a server's own.
MAX_SPEEDUP = 20.0
# Greatest accepted time in ms in a heartbeat.
MAX_PLAUSIBLE_MS = 1e6
# Greatest accepted number of running sessions in a heartbeat.
MAX_RUNNING = 1_000_000


@dataclass(slots=True)
class Server:
    hello: Hello
    heartbeat: Heartbeat | None = None
    other_sessions: int = 0  # sessions of other gateways, at the last heartbeat
    draining: bool = False  # gets new hops only for blocks that no other server holds
    stepped_at: float = -math.inf  # time of the last heartbeat with steps
    placed_load: float = 0.0  # load that this gateway has placed there since the last heartbeat
    reserved_pages: int = 0  # KV pages of that load
    rtt_ms: float | None = None  # shortest recent round trip
    failed_at: float = -math.inf  # time of the last failed step

    @property
    def address(self) -> Address:
        return Address(self.hello.peer, self.hello.target)

    def on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Take a heartbeat. It includes the load placed before it was sent, except hops that were still in flight."""
        if heartbeat.running or self.heartbeat is None or heartbeat.steps != self.heartbeat.steps:
            self.stepped_at = now
        self.heartbeat = heartbeat
        self.placed_load, self.reserved_pages = 0.0, 0

    def reserve(self, positions: int, rows: int) -> None:
        """Add a hop of this gateway: KV for `positions`, and `rows` to run before it is quiescent."""
        self.placed_load += 1 + rows / ROWS_PER_SESSION
        self.reserved_pages += pages_for(positions, self.hello.page_size)

    def record_round_trip(self, seconds: float) -> None:
        """Take a round trip. Long ones may have waited for a step of the server, so the short ones count."""
        took = 1000 * seconds
        known = self.rtt_ms
        self.rtt_ms = took if known is None or took < known else known + RTT_RISE * (took - known)

    # ---- cost inputs, before health

    @property
    def measured_block_ms(self) -> float | None:
        if self.heartbeat is None or not self.heartbeat.steps:
            return None
        return self.heartbeat.step_ms / (self.hello.last - self.hello.first)

    def block_ms(self, median_ms: float, now: float) -> float:
        """Return the time of one block of one step at the present load."""
        measured = self.measured_block_ms
        base = median_ms
        if measured is not None:
            measured = max(measured, median_ms / MAX_SPEEDUP)
            fresh = math.exp(-max(0.0, now - self.stepped_at) / IDLE_DECAY_SECONDS)
            base += fresh * (measured - median_ms)
        return base * self.slowdown

    @property
    def slowdown(self) -> float:
        return 1 + self.load / SESSIONS_PER_STEP

    @property
    def load(self) -> float:
        """Sessions of all gateways that have a turn there."""
        running = self.heartbeat.running if self.heartbeat is not None else 0
        return max(0.0, running + self.placed_load)

    @property
    def queue_ms(self) -> float:
        """Time that the oldest row waits beyond the step it cannot join."""
        return (
            0.0
            if self.heartbeat is None
            else max(0.0, self.heartbeat.oldest_ready_ms - self.heartbeat.step_ms)
        )

    @property
    def free_pages(self) -> float:
        if self.heartbeat is None:
            return float(self.hello.total_pages - self.reserved_pages)
        return float(self.heartbeat.free_pages - self.reserved_pages)

    def room_with(self, free_pages: int) -> int:
        """Return the positions that a new session can reserve while so many pages are free."""
        usable = free_pages - math.ceil(RECOVERY_RESERVE * self.hello.total_pages)
        return max(0, usable) * self.hello.page_size

    def predicted_wait_ms(self, positions: int, for_recovery: bool) -> float:
        """Return the predicted wait for the KV of so many more positions."""
        free, total, page = self.free_pages, self.hello.total_pages, self.hello.page_size
        columns = (np.array([float(each)]) for each in (free, total, page))
        return float(kv_wait_ms(positions, for_recovery, *columns)[0])


def kv_wait_ms(
    positions: int, for_recovery: bool, free: Floats, total: Floats, page: Floats
) -> Floats:
    """Return the predicted wait for the KV of so many more positions, by server.

    Columns by server: `free` and `total` pages, and the positions of a `page`.
    """
    usable = free if for_recovery else free - np.ceil(RECOVERY_RESERVE * total)
    wait = np.zeros(len(free))
    tight = np.flatnonzero((page * usable < positions) & (total > 0) & (page > 0))
    if positions > 0 and tight.size:
        short = np.ceil(positions / page[tight]) - usable[tight]
        wait[tight] = MIN_KV_WAIT_MS + FULL_KV_WAIT_MS * short / total[tight]
    return wait


def pages_for(positions: int, page_size: int) -> int:
    return -(-positions // page_size) if page_size else 0


def sanitized(heartbeat: Heartbeat) -> Heartbeat:
    """Return the heartbeat with implausible values replaced by the worst accepted ones.

    One NaN, infinite or negative time would spoil the cost of every route over the server's blocks, also around it.
    """
    times = (
        heartbeat.step_ms,
        heartbeat.step_p99_ms,
        heartbeat.oldest_ready_ms,
        heartbeat.stepping_ms,
    )
    sums = (heartbeat.busy_ms, heartbeat.read_bytes)
    fair = all(0 <= each <= MAX_PLAUSIBLE_MS for each in times) and all(
        0 <= each < math.inf for each in sums
    )
    if fair and heartbeat.running <= MAX_RUNNING:
        return heartbeat
    step, p99, oldest, stepping = (
        t if 0 <= t <= MAX_PLAUSIBLE_MS else MAX_PLAUSIBLE_MS for t in times
    )
    busy, read = (each if 0 <= each < math.inf else 0.0 for each in sums)
    return replace(
        heartbeat,
        step_ms=step,
        step_p99_ms=p99,
        oldest_ready_ms=oldest,
        stepping_ms=stepping,
        busy_ms=busy,
        read_bytes=read,
        running=min(heartbeat.running, MAX_RUNNING),
    )
