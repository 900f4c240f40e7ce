"""One hop: all that this server knows of one (session, block range), under one handle.

`server.py` holds the hops and calls the other modules of this folder on them. State that a Fence resets is set in
`stop_epoch`, what Go sets in `run`; between the two, what outran Go is kept (R10). Knows nothing of other hops.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field

from modelswarm.protocol.identity import NO_EPOCH, Epoch, Handle, PeerId
from modelswarm.protocol.messages import (
    Counters,
    Fence,
    Fenced,
    Go,
    Input,
    Neighbour,
    Rows,
    Sampling,
    Token,
    Trouble,
    Turn,
    Window,
)
from modelswarm_serving.core.hops.row_buffer import RowInbox


class Phase(enum.Enum):
    FENCED = "fenced"  # waits for Go
    RUNNING = "running"
    STOPPED = "stopped"  # something was wrong and is reported: nothing moves until the next Fence


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a hop can't go on in this epoch."""

    trouble: Trouble
    detail: str


@dataclass(slots=True)
class Cursor:
    """Where a copy of these blocks of this hop goes, and the next position of it (R13)."""

    to: Neighbour
    next: int  # to be read
    blocks: tuple[int, int]
    seen: int = 0  # positions that the hop had at the last look


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """Positions that came from the hop that this one is a copy of, and wait to be written."""

    first: int
    count: int
    kv: bytes | memoryview
    rows: bytes  # at the end of the hop, as the other kept them; empty when it did not


def sampling_fault(wanted: Sampling) -> str | None:
    """What a sampler could not take; checked here, since a step that raises stops every session in it."""
    limits = (
        ("temperature", wanted.temperature, 0.0, math.inf),
        ("top_k", wanted.top_k, 0, math.inf),
        ("top_p", wanted.top_p, 0.0, 1.0),
        ("min_p", wanted.min_p, 0.0, 1.0),
        ("repetition_penalty", wanted.repetition_penalty, 0.0, math.inf),
        ("seed", wanted.seed, 0, (1 << 64) - 1),
    )
    for name, value, least, most in limits:
        if not least <= value <= most or value == math.inf:  # neither is a NaN in range
            return f"{name} is {value}; it must be between {least} and {most}"
    return None


@dataclass(slots=True)
class Early:
    """What arrived after the Fence and before Go (R10), with its sender: only Go says who the neighbours are."""

    rows: list[tuple[PeerId, Rows]] = field(default_factory=list)
    row_count: int = 0
    windows: dict[PeerId, Window] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)  # only while the cut itself is pending


@dataclass(slots=True, eq=False)
class Hop:
    """Positions [0, kv) hold valid KV. Names and meanings as in PROTOCOL section 1."""

    session: str
    first: int
    last: int
    is_head: bool
    is_tail: bool
    handle: Handle
    gateway: PeerId
    reply: Handle
    epoch: Epoch
    turn: Turn
    pages: list[int]
    inbox: RowInbox

    phase: Phase = Phase.FENCED
    kv: int = 0
    log: list[int] = field(default_factory=list)  # head and tail; the head's is its input queue
    counters: Counters | None = None  # frozen at the first Fence after a Go
    answer: Fenced | None = None  # given to this epoch's Fence; none once Go has come
    repair: bool = False  # its turn had begun, here or elsewhere, before its next Go (R12)
    ever_ran: bool = False
    led: bool = False  # the gateway that has it now has run it, and its lease never ended since
    ran: Epoch = NO_EPOCH  # the newest of the session's epochs that ran, as far as is known here

    go: Go | None = None
    received: int = 0
    sent: int = 0
    granted: int = 0
    window: int = 0
    acked: int = 0  # what the successor says it has received
    credit: int = 0
    tokens_sent: int = 0
    acknowledged: bool = False  # the predecessor was told that all its bulk rows are here (R9)
    finished: bool = False  # the last token of the turn was made (tail) or stored (head)
    held: Token | None = None  # tail: the one token beyond the credit (R7)
    unsent: deque[tuple[int, bytes | memoryview]] = field(default_factory=deque)  # R9: live rows
    early: Early = field(default_factory=Early)
    cursors: dict[Handle, Cursor] = field(default_factory=dict)  # of copies of this hop, by target
    copy_windows: dict[PeerId, Window] = field(default_factory=dict)  # of those
    copied: deque[Copied] = field(default_factory=deque)  # warm: to be written
    told_at: float = -math.inf  # warm: when the gateway last heard how far it is

    touched: float = -math.inf  # when its gateway or a step last had to do with it
    wanted: float = -math.inf  # when another gateway last took a copy of its log, as `Peers.awake`
    busy: bool = False  # in the step that is out: pages and log are borrowed by the model
    pending: Fence | None = None  # the cut to make when that step retires
    freed: bool = False  # its pages go back when that step retires
    alone: bool = False  # it was in a step that raised: it runs next by itself
    decode_hops: int = 0  # counted by the scheduler as a decoding session of so many hops

    @property
    def warm(self) -> bool:
        """It runs beside the route (R13)."""
        return self.go is not None and self.go.warm

    @property
    def range(self) -> tuple[str, int, int]:
        return (self.session, self.first, self.last)

    def stop_epoch(self) -> None:
        """What a Fence does at once, even while a step is out: nothing more is sent or planned (R2)."""
        if self.go is not None:  # a warm hop was no part of the route that may have failed
            self.counters = None if self.go.warm else self._count(self.go)
        self.phase, self.go, self.answer = Phase.FENCED, None, None
        self.granted = self.window = self.acked = self.credit = self.tokens_sent = 0
        self.acknowledged = self.finished = False
        self.held = None
        self.inbox.clear()
        self.unsent.clear()
        self.end_copies()
        self.told_at = -math.inf
        self.early = Early()

    def end_copies(self) -> None:
        self.cursors.clear()
        self.copy_windows.clear()
        self.copied.clear()

    def _count(self, go: Go) -> Counters:
        received = len(self.log) if self.is_head else self.received
        return Counters(
            epoch=go.epoch,
            received=received,
            sent=self.sent,
            granted=self.granted,
            window=self.window,
            tokens_sent=self.tokens_sent,
            # the ring starts at L, however much of the Input is still on its way
            tokens_received=max(len(self.log), go.length) if self.is_head else 0,
        )

    def cut(self, kv: int, log: int) -> None:
        """Cut KV and log copy; no step may be out."""
        del self.log[max(0, log) :]
        self.kv = max(0, min(self.kv, kv))
        if self.is_head:
            self.kv = min(self.kv, len(self.log))
        self.received = self.sent = self.kv

    def run(self, go: Go) -> None:
        """Begin to run an epoch. Windows and credit that came before Go stay (R10)."""
        self.go, self.answer, self.phase = go, None, Phase.RUNNING
        self.ever_ran = self.led = True
        if not go.warm:  # on the other lane, what is sent after its Go may outrun it
            del self.log[go.length :]
            self.ran = max(self.ran, go.epoch)
        self.kv = self.received = go.start
        self.sent = go.send_from
        self.credit = max(self.credit, go.credit)
        self.tokens_sent = go.length if self.is_tail else 0

    def refuse(self, go: Go) -> None:
        """A Go that can't be followed still was this epoch's Go."""
        self.go, self.answer, self.phase = go, None, Phase.STOPPED

    def go_fault(self, go: Go) -> Fault | None:
        """What is wrong with a Go, checked before `run`."""
        n = go.length - 1
        begins_here = self.is_head and not go.warm  # a copy has the hop it copies before it
        ends_here = self.is_tail or go.warm
        if (go.predecessor is None) != begins_here or (go.successor is None) != ends_here:
            return Fault(Trouble.FAILED, "the neighbours do not fit the blocks of this hop")
        if go.sample and self.is_tail and not self.is_head and not go.warm and go.ring is None:
            return Fault(Trouble.FAILED, "a tail without a ring target")
        if not 0 <= go.start <= min(self.kv, n):
            return Fault(Trouble.FAILED, f"start {go.start} is beyond kv {self.kv} or row {n}")
        if n + (go.sample and not go.warm) > self.turn.reserve:
            return Fault(Trouble.FAILED, f"{go.length} entries, {self.turn.reserve} reserved")
        if self.is_tail and (wrong := sampling_fault(self.turn.sampling)) is not None:
            return Fault(Trouble.FAILED, wrong)
        return None

    def ready_end(self) -> int:
        """Rows [kv, ready_end) may run now; meaningful while running and no step is out. Not for copies."""
        go = self.go
        assert go is not None
        if not self.is_head:
            end = self.received
        elif self.is_tail:  # a route of one hop is its own ring
            end = min(len(self.log) - self.finished, max(go.length, self.credit))
        else:
            end = len(self.log) - self.finished
        if self.is_tail:
            if end >= go.length and not self.is_head:  # R10
                end = go.length - 1 if len(self.log) < go.length else min(end, len(self.log))
        else:  # R11
            end = min(end, max(self.window, go.send_from))
        if not go.sample:
            end = min(end, go.length - 1)
        return min(end, self.turn.reserve)

    def talks_to(self, peer: PeerId) -> bool:
        go = self.go
        if go is None:
            return False
        return any(
            neighbour is not None and neighbour.address.peer == peer
            for neighbour in (go.predecessor, go.successor, go.ring)
        )
