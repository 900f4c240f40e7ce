"""One server as this gateway knows it: who it says it is, its last beat, what was placed on it since; and what that
makes a hop there cost.

Kept by `server_registry.py`, read by `pricing.py`. Pure; knows no other servers: what is usual among them is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from modelswarm.protocol.identity import Address
from modelswarm.protocol.messages import Heartbeat, Hello

Floats = npt.NDArray[np.float64]

DEFAULT_BLOCK_MS = 1.0  # of a block, as long as no server has run a step
HOP_OVERHEAD_MS = 0.5  # what a hop costs an idle server besides its blocks
SESSIONS_PER_STEP = 2.0  # so many sessions more make a server seem as slow again
ROWS_PER_SESSION = 512  # rows to prefill or replay that weigh like one session more
IDLE_DECAY_SECONDS = 10.0  # what an idle server said of its last steps fades into what is usual
RTT_NOISE_MS = 1.0  # differences of round trips below this mean nothing
MIN_KV_WAIT_MS = 2_500.0  # least wait for KV that is not free
FULL_KV_WAIT_MS = 10_000.0  # ... and for as many pages as a server has
RECOVERY_RESERVE = 0.1  # of a server's pages (R12)
MAX_SPEEDUP = 20.0  # times faster than usual: nobody is believed to be more
MAX_PLAUSIBLE_MS = 1e6  # that a server is believed to take for anything
MAX_RUNNING = 1_000_000  # sessions


@dataclass(slots=True)
class Server:
    hello: Hello
    heartbeat: Heartbeat | None = None
    other_sessions: int = 0  # sessions of other gateways, when it beat last
    draining: bool = False  # to be left: only if nobody else holds a block
    stepped_at: float = -math.inf  # when a beat last told of steps
    placed_load: float = 0.0  # load that this gateway has put there since the last beat
    reserved_pages: int = 0  # pages of it
    rtt_ms: float | None = None  # shortest round trip seen lately
    failed_at: float = -math.inf  # a step failed there

    @property
    def address(self) -> Address:
        return Address(self.hello.peer, self.hello.target)

    def on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """What was placed before it was sent is in it, but for what is still on its way."""
        if heartbeat.running or self.heartbeat is None or heartbeat.steps != self.heartbeat.steps:
            self.stepped_at = now
        self.heartbeat = heartbeat
        self.placed_load, self.reserved_pages = 0.0, 0

    def reserve(self, positions: int, rows: int) -> None:
        """A hop of ours is made there: KV for `positions`, and `rows` to run before it is at rest."""
        self.placed_load += 1 + rows / ROWS_PER_SESSION
        self.reserved_pages += pages_for(positions, self.hello.page_size)

    def record_round_trip(self, seconds: float) -> None:
        """A round trip took so long; others waited for a step there, so short ones count."""
        took = 1000 * seconds
        known = self.rtt_ms
        self.rtt_ms = took if known is None or took < known else known + 0.02 * (took - known)

    # ---- what it costs, before health

    @property
    def measured_block_ms(self) -> float | None:
        if self.heartbeat is None or not self.heartbeat.steps:
            return None
        return self.heartbeat.step_ms / (self.hello.last - self.hello.first)

    def block_ms(self, median_ms: float, now: float) -> float:
        """One block of one step, as busy as the server is now."""
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
        """Sessions in a turn there, of all gateways."""
        running = self.heartbeat.running if self.heartbeat is not None else 0
        return max(0.0, running + self.placed_load)

    @property
    def queue_ms(self) -> float:
        """Rows that wait for more than the step they cannot join."""
        return 0.0 if self.heartbeat is None else max(0.0, self.heartbeat.oldest_ready_ms - self.heartbeat.step_ms)

    @property
    def free_pages(self) -> float:
        if self.heartbeat is None:
            return float(self.hello.total_pages - self.reserved_pages)
        return float(self.heartbeat.free_pages - self.reserved_pages)

    def predicted_wait_ms(self, positions: int, for_recovery: bool) -> float:
        """Predicted wait for the KV of so many more positions."""
        free, total, page = self.free_pages, self.hello.total_pages, self.hello.page_size
        columns = (np.array([float(each)]) for each in (free, total, page))
        return float(kv_wait_ms(positions, for_recovery, *columns)[0])


def kv_wait_ms(positions: int, for_recovery: bool, free: Floats, total: Floats, page: Floats) -> Floats:
    """Predicted wait for the KV of so many more positions, by server: of those with so many pages, so many of them
    free, of so many positions each."""
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
    """What can be reckoned with: one time that is no number, or endless, or negative would spoil every route over its
    server's blocks, also those around it. Whoever says such things is taken to be as slow as can be."""
    times = (heartbeat.step_ms, heartbeat.step_p99_ms, heartbeat.oldest_ready_ms, heartbeat.stepping_ms)
    fair = all(0 <= each <= MAX_PLAUSIBLE_MS for each in times) and 0 <= heartbeat.busy_ms < math.inf
    if fair and heartbeat.running <= MAX_RUNNING:
        return heartbeat
    step, p99, oldest, stepping = (t if 0 <= t <= MAX_PLAUSIBLE_MS else MAX_PLAUSIBLE_MS for t in times)
    return replace(
        heartbeat,
        step_ms=step,
        step_p99_ms=p99,
        oldest_ready_ms=oldest,
        stepping_ms=stepping,
        busy_ms=heartbeat.busy_ms if 0 <= heartbeat.busy_ms < math.inf else 0.0,
        running=min(heartbeat.running, MAX_RUNNING),
    )
