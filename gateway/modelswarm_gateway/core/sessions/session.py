"""One session on the gateway: the input log (I1, truth), the route, and the truncation limits of each hop.

Plain state with its own arithmetic, used by the whole core. The recovery loop (`recovery/recovery.py`) decides when it
changes. Knows neither messages nor servers' costs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from modelswarm.protocol.identity import (
    NO_EPOCH,
    NO_HANDLE,
    Adapter,
    Address,
    Epoch,
    ForkSource,
    Handle,
    PeerId,
)
from modelswarm.protocol.input_log import common_prefix_length
from modelswarm.protocol.messages import Counters, RetainedRows, Turn
from modelswarm_gateway.core.interface.turn import RefusalReason, TokenLogprobs
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.servers.numerics import BlockClass
from modelswarm_gateway.core.servers.variant import ModelVariant

NO_TRUNCATION = 1 << 60  # positions: a limit that no log reaches
# Seconds from the end of a turn, or from a fork of it, to the Fence of its hops. The last messages of the turn arrive
# before it, and the copies of a fork are complete.
PARK_SECONDS = 1.0


class SessionState(enum.Enum):
    PARKED = "parked"  # no turn runs
    FENCING = "fencing"  # in the recovery loop: waiting for FenceAcks
    RUNNING = "running"  # StartEpoch was sent
    HELD = "held"  # in the recovery loop: waiting for a server or for room


@dataclass(slots=True)
class Hop:
    """Blocks [first, last) of one session on one server."""

    server: Address
    first: int
    last: int
    gateway_handle: Handle  # chosen by this gateway
    server_handle: Handle = NO_HANDLE  # chosen by the server; NO_HANDLE until its FenceAck
    handle_epoch: Epoch = NO_EPOCH  # FenceAcks of lower epochs are about an earlier creation
    # Lowest truncations since the last FenceAck (R3, lowest cuts); 0: a created hop must start empty.
    kv_limit: int = 0
    log_limit: int = 0
    fence_epoch: Epoch = NO_EPOCH  # epoch of the last Fence
    create_epoch: Epoch | None = None  # epoch of the last create that has no FenceAck yet
    is_fenced: bool = False  # the FenceAck for the session's epoch has come
    # The FenceAck will answer the Fence sent at `Session.fenced_at`: it measures the round trip.
    is_round_trip_timed: bool = True
    kv: int = 0
    log: int = 0
    retained: tuple[RetainedRows, ...] = ()
    counters: Counters | None = None  # as frozen by the Fence; of the last epoch that ran
    accepted_turn: int = 0  # number of the last turn this hop has accepted
    is_relinquished: bool = False  # its Close leaves KV and log to another gateway
    zone: str = ""  # failure domain of its server
    grammar_version: str = ""  # library and version of the grammars of its server
    numerics: str = ""  # numerics class of its server
    route_hop: RouteHop | None = None  # the planner's choice and its costs; None after a takeover

    def truncate(self, kv: int, log: int) -> None:
        """Lower the limits up to which the KV and the log copy of this hop are valid."""
        self.kv_limit, self.log_limit = min(self.kv_limit, kv), min(self.log_limit, log)

    def forget(self, epoch: Epoch) -> None:
        """Forget the server's state: it no longer knows this hop, which must be created again from `epoch` on."""
        self.handle_epoch, self.fence_epoch = epoch, NO_EPOCH
        self.server_handle, self.accepted_turn = NO_HANDLE, 0
        self.kv, self.log, self.retained = 0, 0, ()
        self.is_fenced = False

    @property
    def peer(self) -> PeerId:
        return self.server.peer

    @property
    def blocks(self) -> tuple[int, int]:
        return self.first, self.last


@dataclass(slots=True)
class OwnershipQuery:
    """The question to all servers for the owner of a session that was cut off (R20, ownership)."""

    newest_run_epoch: Epoch  # newest one that this gateway knew to have run when it was cut off
    since: float = math.inf  # start of the hold or stall that cut it off
    is_cut_off: bool = False  # once no server of it was linked: a gateway may have taken it over
    due_at: float = math.inf  # Fences from then on wait for it
    until: float = -math.inf  # answers are awaited until then; -inf: not asked yet
    unanswered: set[PeerId] = field(default_factory=set)
    lost: set[PeerId] = field(default_factory=set)  # had no link then: waited for longer


@dataclass(frozen=True, slots=True)
class SessionBefore:
    """The state of a session before a turn that has not started: a refused turn restores it (R12, admission)."""

    log: list[int]
    opaque: dict[int, bytes]
    logprobs: dict[int, TokenLogprobs]
    keeps_logprobs: bool
    turn: Turn
    hops: list[Hop]
    tokenizer: str


@dataclass(slots=True)
class Session:
    """One live context and the state of its turn."""

    name: str
    model: str
    epoch: Epoch
    variant: ModelVariant | None = None  # of the servers of this turn
    newest_run_epoch: Epoch = NO_EPOCH  # newest epoch that is known to have run, here or elsewhere
    found_epoch: Epoch = NO_EPOCH  # when it was opened: what ran below it is older
    is_named: bool = False  # a client chose the name and may use it again after the session ended
    query: OwnershipQuery | None = None  # another gateway may own it
    log: list[int] = field(default_factory=list)
    opaque: dict[int, bytes] = field(default_factory=dict)  # rows of the log's opaque entries (R14)
    groups: int = 0  # Tokens that were logged, each with the tokens forced after it
    # Positions whose KV all hops have when it is quiescent: those before the newest group.
    quiescent_kv: int = 0
    tokenizer: str = ""  # digest of the one that the log's tokens are of; "": not known
    keeps_logprobs: bool = False
    # Of generated entries, by position; only of turns that keep them.
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    state: SessionState = SessionState.PARKED
    hops: list[Hop] = field(default_factory=list)
    # New hops of a migration, beside the route.
    copy_targets: list[Hop] = field(default_factory=list)
    # Hops that were replaced in the route. No hop of the route is known to have their log yet.
    lost_hops: list[Hop] = field(default_factory=list)

    turn: Turn = field(default_factory=lambda: Turn(reserved_positions=1, end=1))
    scored: int = 1  # entries of the prompt below this have their log probabilities
    next_row: int = 0  # the first row to be returned that is missing
    row_bytes: int = 0  # of a returned row
    result_groups: int = 0  # items with returned rows, or scores of the prompt, that were taken
    turn_number: int = 0
    # End of a turn that ended by itself, or begin of a fork since; None: its hops are fenced.
    ended_at: float | None = None
    prefill_only: bool = False  # max_tokens 0: the turn runs its prompt and samples nothing
    has_run: bool = False  # an epoch was started: hops created from now on are for recovery
    before: SessionBefore | None = None  # until the turn starts; None for a first turn
    credit_ahead: int = 64
    read_position: int = 0  # the client has read the entries below this
    credit: int = 0  # last credit sent
    credit_cap: int | None = None  # replaces credit_ahead while the session is to migrate

    # Servers that refused or were silent in this attempt.
    excluded: set[PeerId] = field(default_factory=set)
    refusal: RefusalReason = RefusalReason.FAULTS  # the reason why it cannot run
    # Positions: the most that a server has free which refused this turn for want of pages.
    most_room: int | None = None
    crowded: set[PeerId] = field(default_factory=set)  # refused this turn, as their pages are taken
    wanted_positions: int = 0  # to reserve for the last turn, refused or not
    last_fault: str = ""  # cause and server
    fenced_at: float = 0.0
    # Its token was overdue in this epoch; None once the fault is attributed, or when the loop begins anew.
    overdue_epoch: Epoch | None = None
    pending_prefill_rows: int = 0  # rows that the hops run before the first token
    attempts: int = 0  # passes of the recovery loop since the last new token
    overdue_attempts: int = 0  # those of them that an overdue token started
    grammar_version: str = ""  # of the tail that ran the turn's grammar last
    numerics: tuple[BlockClass, ...] = ()  # that its blocks ran in last
    has_migrated: bool = False  # a cutover since the last new token
    is_resumed: bool = False  # the turn continues another gateway's; no new token yet
    fork: Fork | None = None  # what the hops of a first turn copy; None once an epoch has started
    model_failures: int = 0  # model failures since the last new token
    fault_at: float | None = None  # time of the first fault since the last new token
    held_at: float | None = None  # since then the clock of the hold limit runs
    held_seconds: float = 0.0  # in earlier holds since the last new token
    contested_since: float | None = None  # another gateway owns hops of it, with a lower rank
    retry_at: float = 0.0
    hold_tries: int = 0
    reused: int = 0  # entries that this turn found in the head's KV
    reroutes: int = 0  # faults in turns at this gateway
    replayed: int = 0  # entries run again after faults, those of unfinished prompts too

    @property
    def length(self) -> int:
        return len(self.log)

    @property
    def opaque_bytes(self) -> int:
        """Bytes of the rows of its log. All have one size: that of a row, or of one with those of all blocks."""
        return len(self.opaque) * len(next(iter(self.opaque.values()), b""))

    @property
    def boundary_row_bytes(self) -> int:
        """Bytes of a row between two blocks; 0 before a variant is chosen."""
        return 0 if self.variant is None else self.variant.row_bytes

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of its variant."""
        return None if self.variant is None else self.variant.adapter

    @property
    def blocks(self) -> tuple[int, int]:
        """The blocks of its route; only for sessions that have a variant."""
        if self.turn.blocks is not None:
            return self.turn.blocks.first, self.turn.blocks.last
        assert self.variant is not None, "a session that runs has a variant"
        return 0, self.variant.n_blocks

    @property
    def progress(self) -> int:
        """Number of items that have brought the turns on: Tokens, returned rows and scores of prompts."""
        return self.groups + self.result_groups

    @property
    def is_in_turn(self) -> bool:
        return self.state is not SessionState.PARKED

    def is_parkable(self, now: float) -> bool:
        """True if its turn has ended a while ago: its servers count it as running until they are fenced.

        One that was cut off is asked for first (R19, leases).
        """
        ended = self.ended_at is not None and now - self.ended_at >= PARK_SECONDS
        return ended and self.query is None

    @property
    def is_recovering(self) -> bool:
        """True if the turn had started when its route changed: the session is then held and not refused."""
        return self.fault_at is not None or self.has_migrated or self.is_resumed

    @property
    def can_undo_turn(self) -> bool:
        """True for a later turn that has not started: a refusal restores the session."""
        return self.before is not None and not self.is_resumed

    @property
    def routed_attempts(self) -> int:
        """Passes of the recovery loop since the last new token that did not end in a hold."""
        return self.attempts - self.hold_tries

    @property
    def rank(self) -> tuple[Epoch, Epoch]:
        """Order of the gateways that claim it (R20, ownership): what ran counts before what was only tried."""
        return self.newest_run_epoch, self.epoch

    @property
    def last_started(self) -> Epoch | None:
        """The newest epoch that is known to have run; None before."""
        return None if self.newest_run_epoch == NO_EPOCH else self.newest_run_epoch

    @property
    def newest_known_epoch(self) -> Epoch:
        """The newest epoch that is known to have run; before one has, what was found when it was opened."""
        return self.last_started or self.found_epoch

    @property
    def created_hops(self) -> list[Hop]:
        """Hops whose servers know this gateway as the owner."""
        return [hop for hop in self.owned_hops if hop.server_handle != NO_HANDLE]

    @property
    def owned_hops(self) -> list[Hop]:
        """Hops of the route first."""
        return [*self.hops, *self.copy_targets, *self.lost_hops]

    def raise_epoch(self) -> None:
        self.epoch = Epoch(self.epoch.counter + 1, self.epoch.gateway)
        self.overdue_epoch = None  # hops froze their counters at another time, or not yet
        self.ended_at = None

    def truncate_hops(self, kept: int) -> None:
        """Mark as stale everything that hops hold beyond the log's first `kept` entries (R3, lowest cuts)."""
        for hop in self.owned_hops:
            hop.truncate(min(kept, self.length - 1), min(kept, self.length))

    def common_length(self, tokens: Sequence[int], opaque: Mapping[int, bytes]) -> int:
        """Return the entries that the log and `tokens` begin with. `opaque`: rows of `tokens`, perhaps not all."""
        common = common_prefix_length(self.log, tokens)
        changed = (at for at, row in opaque.items() if at < common and self.opaque[at] != row)
        return min(changed, default=common)  # rows with the same hash

    def replace_log(self, tokens: Sequence[int], opaque: Mapping[int, bytes]) -> None:
        """Continue from the longest common prefix of the log and `tokens`. `opaque`: rows, at least of new entries."""
        common = self.common_length(tokens, opaque)
        self.truncate_log(common)
        self.log += tokens[common:]
        self.opaque |= {at: row for at, row in opaque.items() if at >= common}
        self.truncate_hops(common)

    def save_before_turn(self) -> None:
        """Keep what a refused turn restores. A first turn has nothing to restore."""
        if self.has_run:
            self.before = SessionBefore(
                self.log.copy(),
                self.opaque.copy(),
                self.logprobs,
                self.keeps_logprobs,
                self.turn,
                self.hops.copy(),
                self.tokenizer,
            )

    def restore_before_turn(self) -> list[Hop]:
        """Restore log and turn after a refusal; return the hops of the old route that are still open."""
        if self.before is None:
            return self.hops
        before, self.before = self.before, None
        self.log, self.opaque, self.turn = before.log, before.opaque, before.turn
        self.tokenizer = before.tokenizer
        self.logprobs, self.keeps_logprobs = before.logprobs, before.keeps_logprobs
        return [hop for hop in before.hops if hop in self.owned_hops]

    def append_group(self, tokens: Sequence[int]) -> None:
        """Append a sampled token and those that its grammar forced after it."""
        self.groups += 1
        self.quiescent_kv = self.length
        self.log += tokens

    def truncate_log(self, length: int) -> None:
        """Keep the first `length` entries, without a message to the hops."""
        del self.log[length:]
        if self.opaque:
            self.opaque = {at: row for at, row in self.opaque.items() if at < length}
        if self.logprobs:
            self.logprobs = {at: each for at, each in self.logprobs.items() if at < length}

    def record_progress(self) -> float | None:
        """Reset all fault counters after a new token; return the time of the first fault, None if there was none."""
        since, self.fault_at = self.fault_at, None
        self.held_at, self.held_seconds = None, 0.0
        self.contested_since = None
        self.attempts = self.overdue_attempts = self.model_failures = self.hold_tries = (
            self.pending_prefill_rows
        ) = 0
        self.has_migrated = self.is_resumed = False
        return since

    def end_hold(self, now: float) -> None:
        """Stop the clock of the hold limit. It goes on at the next hold."""
        if self.held_at is not None:
            self.held_seconds += max(0.0, now - self.held_at)
            self.held_at = None

    def record_start(self, head: int, lowest: int) -> None:
        """Count reused or replayed entries: the head starts at `head`, the hop furthest behind at `lowest`."""
        self.before = None
        self.pending_prefill_rows = self.length - lowest
        if not self.is_recovering:
            self.reused = head
        else:
            self.replayed += max(0, self.length - 1 - lowest)

    def target_credit(self) -> int:
        """Return the position up to which the tail may sample, given the client's reading position."""
        if self.prefill_only:
            return max(self.read_position, self.length)
        return self.read_position + self._max_ahead

    @property
    def credit_step(self) -> int:
        """Least increase of credit that is worth a message."""
        return max(1, self._max_ahead // 2)

    @property
    def _max_ahead(self) -> int:
        if self.credit_cap is None:
            return self.credit_ahead
        return min(self.credit_ahead, self.credit_cap)

    @property
    def returns_rows(self) -> bool:
        """True if the turn returns rows of logits or hidden states."""
        return self.turn.sampling.returned is not None

    @property
    def has_credit(self) -> bool:
        """True if the tail may sample, or return a row, because the client has read enough (R7, credit)."""
        return (self.next_row if self.returns_rows else self.length - 1) < self.credit

    @property
    def is_quiescent(self) -> bool:
        """True if the tail may not sample after the newest token: no row of the session is in flight."""
        if self.returns_rows and self.next_row < self.length - 1:
            return False  # rows of the prompt may be on their way
        return not self.prefill_only and self.length > self.credit

    @property
    def waits_for_reader(self) -> bool:
        """True if the tail may not go on because the client has not read enough. False during a cutover, which also
        takes the credit away."""
        is_running = self.state is SessionState.RUNNING and self.credit_cap is None
        return is_running and not self.has_credit


@dataclass(frozen=True, slots=True)
class Fork:
    """The session whose KV below `length` a new session copies, as long as it stays in `epoch` (R15, forks)."""

    parent: Session
    epoch: Epoch
    length: int

    def source_of(self, hop: Hop) -> ForkSource | None:
        """Return the parent's hop with the same blocks on the same server; None if there is none."""
        for each in self.parent.hops:
            if (each.peer, each.blocks) == (hop.peer, hop.blocks):
                known = each.server_handle != NO_HANDLE
                return ForkSource(each.server_handle, self.epoch, self.length) if known else None
        return None


def find_fork(session: Session, parent: Session | None) -> Fork | None:
    """Return what the first turn of a session can copy from its parent.

    Nothing if log probabilities of its prompt or rows are wanted: only rows that run can be scored or returned.
    """
    if parent is None or session.has_run or session.turn.sampling.prompt_logprobs >= 0:
        return None
    if session.returns_rows:
        return None
    if (parent.model, parent.variant) != (session.model, session.variant):
        return None
    length = min(parent.common_length(session.log, session.opaque), session.length - 1)
    return Fork(parent, parent.epoch, length) if length > 0 else None


def ring_neighbours(session: Session, hop: Hop) -> frozenset[PeerId]:
    """Return the servers that a hop of the route exchanges rows or tokens with: route and ring make a circle."""
    at = session.hops.index(hop)
    around = session.hops[at - 1], session.hops[(at + 1) % len(session.hops)]
    return frozenset(other.peer for other in around if other is not hop)


def longest_chain(hops: Iterable[Hop]) -> list[Hop]:
    """Return hops for one route in block order; of two for the same blocks the one that may have more KV."""
    chain: list[Hop] = []
    for hop in sorted(hops, key=lambda hop: (hop.first, -hop.kv_limit)):
        if not chain or hop.first >= chain[-1].last:
            chain.append(hop)
    return chain
