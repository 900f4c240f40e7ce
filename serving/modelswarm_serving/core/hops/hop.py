"""One hop: the state of one (session, block range) on this server, under one handle.

`server.py` and the modules of `flow/` and `kv/` work on it. `stop_epoch` resets what a Fence resets, `start_epoch` sets
what StartEpoch sets. Messages that arrive between the two are buffered (R10, early messages). Knows no other hops.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field

from modelswarm.protocol.identity import NO_EPOCH, Epoch, Handle, PeerId
from modelswarm.protocol.messages import (
    MAX_LOGPROBS,
    Counters,
    FaultKind,
    Fence,
    FenceAck,
    Input,
    Neighbour,
    ReturnedRows,
    Rows,
    Sampling,
    StartEpoch,
    Token,
    Turn,
    Window,
)
from modelswarm_serving.core.hops.row_buffer import RowBuffer

NO_LIMIT = 1 << 60  # entries: every log is shorter


class Phase(enum.Enum):
    FENCED = "fenced"  # waits for StartEpoch
    RUNNING = "running"
    STOPPED = "stopped"  # a fault was reported: nothing runs until the next Fence


@dataclass(frozen=True, slots=True)
class Fault:
    """Reason for which a hop cannot continue in this epoch."""

    kind: FaultKind
    detail: str


@dataclass(slots=True)
class TransferCursor:
    """Target of a KV transfer of these blocks, and the next position to send (R13, migration)."""

    target: Neighbour
    next_position: int  # to be read
    blocks: tuple[int, int]
    seen_kv: int = 0  # `kv` of the hop when the last step was planned


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedKv:
    """Positions of a KV transfer that arrived at a standby hop and wait to be written."""

    first: int
    count: int
    kv: bytes | memoryview
    output_rows: bytes  # output rows that the sender retained; empty if it had none


def sampling_fault(wanted: Sampling) -> str | None:
    """Describe sampling parameters that a sampler cannot use; None if all are valid.

    Checked here because a step that raises delays every session in it.
    """
    limits = (
        ("temperature", wanted.temperature, 0.0, math.inf),
        ("top_k", wanted.top_k, 0, math.inf),
        ("top_p", wanted.top_p, 0.0, 1.0),
        ("min_p", wanted.min_p, 0.0, 1.0),
        ("repetition_penalty", wanted.repetition_penalty, 0.0, math.inf),
        ("seed", wanted.seed, 0, (1 << 64) - 1),
        ("logprobs", wanted.logprobs, 0, MAX_LOGPROBS),
    )
    for name, value, least, most in limits:
        if not least <= value <= most or value == math.inf:  # neither is a NaN in range
            return f"{name} is {value}; it must be between {least} and {most}"
    return None


@dataclass(slots=True)
class EarlyMessages:
    """Messages that arrived between Fence and StartEpoch (R10, early messages), with their senders: only StartEpoch
    names the neighbours."""

    rows: list[tuple[PeerId, Rows]] = field(default_factory=list)
    row_count: int = 0
    windows: dict[PeerId, Window] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)  # only while the Fence itself is pending


@dataclass(slots=True, eq=False)
class Hop:
    """State of a hop; positions [0, kv) hold valid KV. Names and meanings as in docs/protocol.md."""

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
    has_range: bool = (
        False  # of a session with a block range: its head takes rows, its tail returns them
    )

    phase: Phase = Phase.FENCED
    kv: int = 0
    log: list[int] = field(default_factory=list)  # head and tail only; for the head its input queue
    # Rows of the log's opaque entries (R14). Neither head nor tail: those of its own blocks, of this epoch.
    opaque: dict[int, bytes] = field(default_factory=dict)
    counters: Counters | None = None  # frozen at the first Fence after a StartEpoch
    fence_ack: FenceAck | None = None  # reply to this epoch's Fence; None after StartEpoch
    for_recovery: bool = False  # its turn had started before, here or elsewhere (R12, admission)
    was_started: bool = False
    started_by_owner: bool = False  # the owner started it, and its lease has not expired since
    newest_run_epoch: Epoch = NO_EPOCH  # newest epoch of the session known to have run
    ran_log: int = 0  # log entries that were here at the last cut; later ones have not run

    started: StartEpoch | None = None
    received: int = 0
    sent: int = 0
    granted: int = 0
    window: int = 0
    acked: int = 0  # rows that the successor has acknowledged
    credit: int = 0
    tokens_sent: int = 0
    bulk_acknowledged: bool = False  # predecessor knows: all its bulk rows are here (R9, lanes)
    finished: bool = False  # the last token of the turn was sampled (tail) or stored (head)
    awaits_grammar: bool = False  # tail: its grammar is being compiled, so it samples nothing yet
    withheld_token: Token | None = None  # tail: the one group beyond the credit (R7, credit)
    # live rows (R9, lanes)
    unsent: deque[tuple[int, int, bytes | memoryview]] = field(default_factory=deque)
    early: EarlyMessages = field(default_factory=EarlyMessages)
    transfers: dict[Handle, TransferCursor] = field(
        default_factory=dict
    )  # KV transfers from this hop
    transfer_windows: dict[PeerId, Window] = field(default_factory=dict)  # of those transfers
    received_kv: deque[ReceivedKv] = field(default_factory=deque)  # standby: to be written
    progress_sent_at: float = -math.inf  # standby: last progress message to the gateway

    last_used: float = -math.inf  # last message of its gateway or last step
    # It is kept for two leases from then on: its last LogRequest, or when it was relinquished (`Peers.elapsed` time).
    kept_since: float = -math.inf
    in_step: bool = False  # in the running step: the model borrows pages and log
    pending_fence: Fence | None = None  # to apply when that step ends
    is_freed: bool = False  # its pages are released when that step ends
    alone_rows: int = 0  # it was in a step that raised: at most these run in a step of its own
    decode_hops: int = 0  # the scheduler counts it as a decoding session of this many hops

    @property
    def has_log(self) -> bool:
        """True for head and tail."""
        return self.is_head or self.is_tail

    @property
    def is_standby(self) -> bool:
        """True for a hop that receives KV beside the route (R13, migration)."""
        return self.started is not None and self.started.standby

    @property
    def key(self) -> tuple[str, int, int]:
        return (self.session, self.first, self.last)

    @property
    def rank(self) -> tuple[Epoch, Epoch]:
        """Order of the gateways that claim a hop (R20, ownership): what ran counts before what was only tried."""
        return self.newest_run_epoch, self.epoch

    @property
    def durable_log(self) -> int:
        """Log entries that the next cut keeps: a pending Fence and what has not run are left out."""
        cut = self.ran_log if self.pending_fence is None else self.pending_fence.log_cut
        return max(0, min(len(self.log), self.ran_log, cut))

    @property
    def opaque_bytes(self) -> int:
        """Bytes of the rows of its opaque entries. All have one size: every tick asks, and there may be 100,000."""
        return len(self.opaque) * len(next(iter(self.opaque.values()), b""))

    def stop_epoch(self) -> None:
        """Reset the epoch at once, even while a step runs: nothing more is sent or planned (R2, fences)."""
        if self.started is not None:  # a standby hop was not part of the route that may have failed
            self.counters = None if self.started.standby else self._counters_of(self.started)
        self.phase, self.started, self.fence_ack = Phase.FENCED, None, None
        self.granted = self.window = self.acked = self.credit = self.tokens_sent = 0
        self.bulk_acknowledged = self.finished = self.awaits_grammar = False
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
            # the ring starts at L, however much of the Input is still in flight
            tokens_received=max(len(self.log), started.length) if self.is_head else 0,
            unsent=sum(count for _, count, _ in self.unsent),
        )

    def truncate(self, kv: int, log: int) -> None:
        """Truncate KV and log; the hop must not be in a step. Entries that have not run are dropped (R20, takeover)."""
        ran = max(self.ran_log, self.kv if self.is_head else 0)
        self._truncate_log(max(0, min(log, ran)))
        self.ran_log = len(self.log)
        self.kv = max(0, min(self.kv, kv))
        if self.is_head:
            self.kv = min(self.kv, len(self.log))
        self.received = self.sent = self.kv

    def _truncate_log(self, length: int) -> None:
        del self.log[length:]
        if self.opaque:
            self.opaque = {at: row for at, row in self.opaque.items() if at < length}

    def drop_used_rows(self) -> None:
        """Drop rows that only this epoch needs, and that have run (R14, opaque rows)."""
        if not self.has_log and self.opaque:
            self.opaque = {at: row for at, row in self.opaque.items() if at >= self.kv}

    def start_epoch(self, message: StartEpoch) -> None:
        """Start an epoch. Windows and credit that came before StartEpoch stay (R10, early messages)."""
        self.started, self.fence_ack, self.phase = message, None, Phase.RUNNING
        self.was_started = self.started_by_owner = True
        if not message.standby:  # on the other lane, later messages may overtake its StartEpoch
            self._truncate_log(message.length)
            self.newest_run_epoch = max(self.newest_run_epoch, message.epoch)
        self.kv = self.received = message.start
        self.sent = message.send_from
        self.credit = max(self.credit, message.credit)
        self.tokens_sent = message.length if self.is_tail else 0
        samples = self.is_tail and message.sample and not message.standby
        self.awaits_grammar = samples and self.turn.sampling.grammar is not None
        self.on_log_extended()

    def on_log_extended(self) -> None:
        """Count new entries as run once the epoch has its whole log: a part hides no older log (R20, takeover)."""
        started = self.started
        if started is not None and (started.standby or len(self.log) >= started.length):
            self.ran_log = NO_LIMIT

    def refuse_start(self, message: StartEpoch) -> None:
        """Stop the hop: a StartEpoch that cannot be followed is still the one of this epoch."""
        self.started, self.fence_ack, self.phase = message, None, Phase.STOPPED

    def start_fault(self, message: StartEpoch) -> Fault | None:
        """Return the fault of a StartEpoch, or None; called before `start_epoch`."""
        n = message.length - 1
        begins_here = (
            self.is_head and not message.standby
        )  # the predecessor of a standby hop is its KV source
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
        """Return the end of the rows [kv, ready_end) that may run now. Valid for running hops that are in no step and
        are not standby."""
        started = self.started
        assert started is not None
        if not self.is_head:
            end = self.received
        elif self.is_tail:  # a route of one hop is its own ring
            end = min(len(self.log) - self.finished, max(started.length, self.credit))
        else:
            end = len(self.log) - self.finished
        if self.is_tail:
            if end >= started.length and not self.is_head:  # R10 (early messages)
                end = (
                    started.length - 1
                    if len(self.log) < started.length
                    else min(end, len(self.log))
                )
        else:  # R11 (windows)
            end = min(end, max(self.window, started.send_from))
        if not started.sample or self.awaits_grammar:
            end = min(end, started.length - 1)
        if self.scores_prompt and len(self.log) < started.length:
            end = min(end, self.kv)  # a row is scored with the log entry after it
        if (returned := self.returned_rows) is not None:  # R7 (credit)
            end = min(end, max(self.credit, returned.start))
        prompts = range(self.kv, min(end, self.turn.prompt_rows))
        end = next((at for at in prompts if at not in self.opaque), end)  # R14 (opaque rows)
        return min(end, self.turn.reserved_positions)

    @property
    def only_rows(self) -> bool:
        """True if its turn runs the whole log, row n too, for its rows, and samples nothing."""
        return self.turn.only_rows or self.has_range

    @property
    def scores_prompt(self) -> bool:
        """True for a tail that reports the log probabilities of the prompt."""
        return self.is_tail and self.turn.sampling.prompt_logprobs >= 0

    @property
    def returned_rows(self) -> ReturnedRows | None:
        """The rows that a tail returns to the gateway; None for other hops, and if the turn asks for none."""
        return self.turn.sampling.returned if self.is_tail else None

    def is_neighbour(self, peer: PeerId) -> bool:
        started = self.started
        if started is None:
            return False
        return any(
            neighbour is not None and neighbour.address.peer == peer
            for neighbour in (started.predecessor, started.successor, started.ring)
        )
