"""One server as this gateway knows it: who it says it is, its last beat, what was placed on it since; and what that
makes a hop there cost.

Kept by `fleet.py`, read by `pricing.py`. Pure; knows no other servers: what is usual among them is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from modelswarm.protocol.identity import Address
from modelswarm.protocol.messages import Beat, Hello

Floats = npt.NDArray[np.float64]

UNKNOWN_BLOCK_MS = 1.0  # of a block, as long as no server has run a step
HANDLING_MS = 0.5  # what a hop costs an idle server besides its blocks
SESSIONS_PER_STEP = 2.0  # so many sessions more make a server seem as slow again
ROWS_PER_SESSION = 512  # rows to prefill or replay that weigh like one session more
FORGET_SECONDS = 10.0  # what an idle server said of its last steps fades into what is usual
NOISE_MS = 1.0  # differences of round trips below this mean nothing
SHORT_OF_PAGES_MS = 2_500.0  # least wait for KV that is not free
ALL_PAGES_MS = 10_000.0  # ... and for as many pages as a server has
KEPT_FOR_REPAIRS = 0.1  # of a server's pages (R12)
FASTEST = 20.0  # times faster than usual: nobody is believed to be more
MOST_MS = 1e6  # that a server is believed to take for anything
MOST_RUNNING = 1_000_000  # sessions


@dataclass(slots=True)
class Server:
    hello: Hello
    beat: Beat | None = None
    others: int = 0  # sessions of other gateways, when it beat last
    draining: bool = False  # to be left: only if nobody else holds a block
    stepped_at: float = -math.inf  # when a beat last told of steps
    placed: float = 0.0  # load that this gateway has put there since the last beat
    promised: int = 0  # pages of it
    rtt_ms: float | None = None  # shortest round trip seen lately
    failed_at: float = -math.inf  # a step failed there

    @property
    def address(self) -> Address:
        return Address(self.hello.peer, self.hello.target)

    def heard(self, beat: Beat, now: float) -> None:
        """What was placed before it was sent is in it, but for what is still on its way."""
        if beat.running or self.beat is None or beat.steps != self.beat.steps:
            self.stepped_at = now
        self.beat = beat
        self.placed, self.promised = 0.0, 0

    def place(self, positions: int, rows: int) -> None:
        """A hop of ours is made there: KV for `positions`, and `rows` to run before it is at rest."""
        self.placed += 1 + rows / ROWS_PER_SESSION
        self.promised += pages(positions, self.hello.page_size)

    def answered(self, seconds: float) -> None:
        """A round trip took so long; others waited for a step there, so short ones count."""
        took = 1000 * seconds
        known = self.rtt_ms
        self.rtt_ms = took if known is None or took < known else known + 0.02 * (took - known)

    # ---- what it costs, before health

    @property
    def measured_block_ms(self) -> float | None:
        if self.beat is None or not self.beat.steps:
            return None
        return self.beat.step_ms / (self.hello.last - self.hello.first)

    def block_ms(self, usual: float, now: float) -> float:
        """One block of one step, as busy as the server is now."""
        measured = self.measured_block_ms
        base = usual
        if measured is not None:
            measured = max(measured, usual / FASTEST)
            fresh = math.exp(-max(0.0, now - self.stepped_at) / FORGET_SECONDS)
            base += fresh * (measured - usual)
        return base * self.slowdown

    @property
    def slowdown(self) -> float:
        return 1 + self.load / SESSIONS_PER_STEP

    @property
    def load(self) -> float:
        """Sessions in a turn there, of all gateways."""
        running = self.beat.running if self.beat is not None else 0
        return max(0.0, running + self.placed)

    @property
    def queue_ms(self) -> float:
        """Rows that wait for more than the step they cannot join."""
        return 0.0 if self.beat is None else max(0.0, self.beat.oldest_ready_ms - self.beat.step_ms)

    @property
    def free_pages(self) -> float:
        if self.beat is None:
            return float(self.hello.total_pages - self.promised)
        return float(self.beat.free_pages - self.promised)

    def wait_ms(self, positions: int, repair: bool) -> float:
        """Predicted wait for the KV of so many more positions."""
        free, total, page = self.free_pages, self.hello.total_pages, self.hello.page_size
        columns = (np.array([float(each)]) for each in (free, total, page))
        return float(kv_wait_ms(positions, repair, *columns)[0])


def kv_wait_ms(positions: int, repair: bool, free: Floats, total: Floats, page: Floats) -> Floats:
    """Predicted wait for the KV of so many more positions, by server: of those with so many pages, so many of them
    free, of so many positions each."""
    usable = free if repair else free - np.ceil(KEPT_FOR_REPAIRS * total)
    wait = np.zeros(len(free))
    tight = np.flatnonzero((page * usable < positions) & (total > 0) & (page > 0))
    if positions > 0 and tight.size:
        short = np.ceil(positions / page[tight]) - usable[tight]
        wait[tight] = SHORT_OF_PAGES_MS + ALL_PAGES_MS * short / total[tight]
    return wait


def pages(positions: int, page_size: int) -> int:
    return -(-positions // page_size) if page_size else 0


def plausible(beat: Beat) -> Beat:
    """What can be reckoned with: one time that is no number, or endless, or negative would spoil every route over its
    server's blocks, also those around it. Whoever says such things is taken to be as slow as can be."""
    times = (beat.step_ms, beat.step_p99_ms, beat.oldest_ready_ms, beat.stepping_ms)
    fair = all(0 <= each <= MOST_MS for each in times) and 0 <= beat.busy_ms < math.inf
    if fair and beat.running <= MOST_RUNNING:
        return beat
    step, p99, oldest, stepping = (t if 0 <= t <= MOST_MS else MOST_MS for t in times)
    return replace(
        beat,
        step_ms=step,
        step_p99_ms=p99,
        oldest_ready_ms=oldest,
        stepping_ms=stepping,
        busy_ms=beat.busy_ms if 0 <= beat.busy_ms < math.inf else 0.0,
        running=min(beat.running, MOST_RUNNING),
    )
