"""One server as this gateway knows it: who it says it is, its last beat, what was placed on it since; and what that
makes a hop there cost.

Kept by `fleet.py`, read by `pricing.py`. Pure; knows no other servers: what is usual among them is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelswarm.protocol.identity import Address
from modelswarm.protocol.messages import Beat, Hello

UNKNOWN_BLOCK_MS = 1.0  # of a block, as long as no server has run a step
HANDLING_MS = 0.5  # what a hop costs an idle server besides its blocks
SESSIONS_PER_STEP = 2.0  # so many sessions more make a server seem as slow again
ROWS_PER_SESSION = 512  # rows to prefill or replay that weigh like one session more
FORGET_SECONDS = 10.0  # what an idle server said of its last steps fades into what is usual
NOISE_MS = 1.0  # differences of round trips below this mean nothing
SHORT_OF_PAGES_MS = 2_500.0  # least wait for KV that is not free
ALL_PAGES_MS = 10_000.0  # ... and for as many pages as a server has
KEPT_FOR_REPAIRS = 0.1  # of a server's pages (R12)


@dataclass(slots=True)
class Server:
    hello: Hello
    beat: Beat | None = None
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
        kept = 0.0 if repair else KEPT_FOR_REPAIRS * self.hello.total_pages
        short = pages(positions, self.hello.page_size) - (self.free_pages - kept)
        if short <= 0 or not self.hello.total_pages:
            return 0.0
        return SHORT_OF_PAGES_MS + ALL_PAGES_MS * short / self.hello.total_pages


def pages(positions: int, page_size: int) -> int:
    return -(-positions // page_size) if page_size else 0
