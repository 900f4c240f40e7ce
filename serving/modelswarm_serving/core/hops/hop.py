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
    FaultKind,
    Fence,
    FenceAck,
    Input,
    Neighbour,
    Rows,
    Sampling,
    StartEpoch,
    Token,
    Turn,
    Window,
)
from modelswarm_serving.core.hops.row_buffer import RowBuffer


class Phase(enum.Enum):
    FENCED = "fenced"  # waits for Go
    RUNNING = "running"
    STOPPED = "stopped"  # something was wrong and is reported: nothing moves until the next Fence


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a hop can't go on in this epoch."""

    kind: FaultKind
    detail: str


@dataclass(slots=True)
class TransferCursor:
    """Where a copy of these blocks of this hop goes, and the next position of it (R13)."""

    target: Neighbour
    next_position: int  # to be read
    blocks: tuple[int, int]
    seen_kv: int = 0  # positions that the hop had at the last look


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedKv:
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
class EarlyMessages:
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
    gateway_handle: Handle
    epoch: Epoch
    turn: Turn
    pages: list[int]
    row_buffer: RowBuffer

    phase: Phase = Phase.FENCED
    kv: int = 0
    log: list[int] = field(default_factory=list)  # head and tail; the head's is its input queue
    counters: Counters | None = None  # frozen at the first Fence after a Go
    fence_ack: FenceAck | None = None  # given to this epoch's Fence; none once Go has come
    for_recovery: bool = False  # its turn had begun, here or elsewhere, before its next Go (R12)
    was_started: bool = False
    started_by_owner: bool = (
        False  # the gateway that has it now has run it, and its lease never ended since
    )
    newest_run_epoch: Epoch = (
        NO_EPOCH  # the newest of the session's epochs that ran, as far as is known here
    )

    started: StartEpoch | None = None
    received: int = 0
    sent: int = 0
    granted: int = 0
    window: int = 0
    acked: int = 0  # what the successor says it has received
    credit: int = 0
    tokens_sent: int = 0
    bulk_acknowledged: bool = False  # the predecessor was told that all its bulk rows are here (R9)
    finished: bool = False  # the last token of the turn was made (tail) or stored (head)
    withheld_token: Token | None = None  # tail: the one token beyond the credit (R7)
    unsent: deque[tuple[int, bytes | memoryview]] = field(default_factory=deque)  # R9: live rows
    early: EarlyMessages = field(default_factory=EarlyMessages)
    transfers: dict[Handle, TransferCursor] = field(
        default_factory=dict
    )  # of copies of this hop, by target
    transfer_windows: dict[PeerId, Window] = field(default_factory=dict)  # of those
    received_kv: deque[ReceivedKv] = field(default_factory=deque)  # warm: to be written
    progress_sent_at: float = -math.inf  # warm: when the gateway last heard how far it is

    last_used: float = -math.inf  # when its gateway or a step last had to do with it
    log_requested_at: float = (
        -math.inf
    )  # when another gateway last took a copy of its log, as `Peers.awake`
    in_step: bool = False  # in the step that is out: pages and log are borrowed by the model
    pending_fence: Fence | None = None  # the cut to make when that step retires
    is_freed: bool = False  # its pages go back when that step retires
    run_alone: bool = False  # it was in a step that raised: it runs next by itself
    decode_hops: int = 0  # counted by the scheduler as a decoding session of so many hops

    @property
    def is_standby(self) -> bool:
        """It runs beside the route (R13)."""
        return self.started is not None and self.started.standby

    @property
    def key(self) -> tuple[str, int, int]:
        return (self.session, self.first, self.last)

    def stop_epoch(self) -> None:
        """What a Fence does at once, even while a step is out: nothing more is sent or planned (R2)."""
        if self.started is not None:  # a warm hop was no part of the route that may have failed
            self.counters = None if self.started.standby else self._counters_of(self.started)
        self.phase, self.started, self.fence_ack = Phase.FENCED, None, None
        self.granted = self.window = self.acked = self.credit = self.tokens_sent = 0
        self.bulk_acknowledged = self.finished = False
        self.withheld_token = None
        self.row_buffer.clear()
        self.unsent.clear()
        self.end_transfers()
        self.progress_sent_at = -math.inf
        self.early = EarlyMessages()

    def end_transfers(self) -> None:
        self.transfers.clear()
        self.transfer_windows.clear()
        self.received_kv.clear()

    def _counters_of(self, started: StartEpoch) -> Counters:
        received = len(self.log) if self.is_head else self.received
        return Counters(
            epoch=started.epoch,
            received=received,
            sent=self.sent,
            granted=self.granted,
            window=self.window,
            tokens_sent=self.tokens_sent,
            # the ring starts at L, however much of the Input is still on its way
            tokens_received=max(len(self.log), started.length) if self.is_head else 0,
        )

    def truncate(self, kv: int, log: int) -> None:
        """Cut KV and log copy; no step may be out."""
        del self.log[max(0, log) :]
        self.kv = max(0, min(self.kv, kv))
        if self.is_head:
            self.kv = min(self.kv, len(self.log))
        self.received = self.sent = self.kv

    def start_epoch(self, message: StartEpoch) -> None:
        """Begin to run an epoch. Windows and credit that came before Go stay (R10)."""
        self.started, self.fence_ack, self.phase = message, None, Phase.RUNNING
        self.was_started = self.started_by_owner = True
        if not message.standby:  # on the other lane, what is sent after its Go may outrun it
            del self.log[message.length :]
            self.newest_run_epoch = max(self.newest_run_epoch, message.epoch)
        self.kv = self.received = message.start
        self.sent = message.send_from
        self.credit = max(self.credit, message.credit)
        self.tokens_sent = message.length if self.is_tail else 0

    def refuse_start(self, message: StartEpoch) -> None:
        """A Go that can't be followed still was this epoch's Go."""
        self.started, self.fence_ack, self.phase = message, None, Phase.STOPPED

    def start_fault(self, message: StartEpoch) -> Fault | None:
        """What is wrong with a Go, checked before `run`."""
        n = message.length - 1
        begins_here = self.is_head and not message.standby  # a copy has the hop it copies before it
        ends_here = self.is_tail or message.standby
        if (message.predecessor is None) != begins_here or (message.successor is None) != ends_here:
            return Fault(FaultKind.FAILED, "the neighbours do not fit the blocks of this hop")
        if (
            message.sample
            and self.is_tail
            and not self.is_head
            and not message.standby
            and message.ring is None
        ):
            return Fault(FaultKind.FAILED, "a tail without a ring target")
        if not 0 <= message.start <= min(self.kv, n):
            return Fault(
                FaultKind.FAILED, f"start {message.start} is beyond kv {self.kv} or row {n}"
            )
        if n + (message.sample and not message.standby) > self.turn.reserved_positions:
            return Fault(
                FaultKind.FAILED,
                f"{message.length} entries, {self.turn.reserved_positions} reserved",
            )
        if self.is_tail and (wrong := sampling_fault(self.turn.sampling)) is not None:
            return Fault(FaultKind.FAILED, wrong)
        return None

    def ready_end(self) -> int:
        """Rows [kv, ready_end) may run now; meaningful while running and no step is out. Not for copies."""
        started = self.started
        assert started is not None
        if not self.is_head:
            end = self.received
        elif self.is_tail:  # a route of one hop is its own ring
            end = min(len(self.log) - self.finished, max(started.length, self.credit))
        else:
            end = len(self.log) - self.finished
        if self.is_tail:
            if end >= started.length and not self.is_head:  # R10
                end = (
                    started.length - 1
                    if len(self.log) < started.length
                    else min(end, len(self.log))
                )
        else:  # R11
            end = min(end, max(self.window, started.send_from))
        if not started.sample:
            end = min(end, started.length - 1)
        return min(end, self.turn.reserved_positions)

    def is_neighbour(self, peer: PeerId) -> bool:
        started = self.started
        if started is None:
            return False
        return any(
            neighbour is not None and neighbour.address.peer == peer
            for neighbour in (started.predecessor, started.successor, started.ring)
        )
