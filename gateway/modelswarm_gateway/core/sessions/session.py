"""One session as the gateway knows it: the input log (the truth, I1), its route, and what each hop must be cut to.

Plain state with its own arithmetic; the loop (`recovery.py`) decides when to use it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from modelswarm.protocol.identity import NO_EPOCH, NO_HANDLE, Address, Epoch, Handle, PeerId
from modelswarm.protocol.messages import Counters, RetainedRows, Turn
from modelswarm_gateway.core.interface.turn import RefusalReason
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.servers.variant import ModelVariant

NO_TRUNCATION = 1 << 60


class SessionState(enum.Enum):
    PARKED = "parked"  # no turn runs
    FENCING = "fencing"  # in the loop: waiting for answers
    RUNNING = "running"  # Go was sent
    HELD = "held"  # in the loop: waiting for a server or for room


@dataclass(slots=True)
class Hop:
    """Blocks [first, last) of one session on one server."""

    server: Address
    first: int
    last: int
    gateway_handle: Handle  # the gateway's name of it
    server_handle: Handle = NO_HANDLE  # the server's name of it, once told
    handle_epoch: Epoch = NO_EPOCH  # answers from before this epoch name an earlier life of it
    kv_limit: int = (
        0  # lowest cuts since its last Fenced (R3): what a create finds is another life's
    )
    log_limit: int = 0
    create_epoch: Epoch | None = None  # of the last create, until it is answered
    is_fenced: bool = False  # Fenced for the session's epoch has come
    is_round_trip_timed: bool = (
        True  # ... and took all the time since the Fence: it tells how far the server is
    )
    kv: int = 0
    log: int = 0
    retained: tuple[RetainedRows, ...] = ()
    counters: Counters | None = None  # of its last epoch that ran
    accepted_turn: int = 0  # number of the last turn this hop has accepted
    zone: str = ""  # failure domain of its server
    route_hop: RouteHop | None = None  # why it is there

    def truncate(self, kv: int, log: int) -> None:
        self.kv_limit, self.log_limit = min(self.kv_limit, kv), min(self.log_limit, log)

    def forget(self, epoch: Epoch) -> None:
        """The server no longer knows this hop: from this epoch on it must be created again."""
        self.handle_epoch = epoch
        self.server_handle, self.kv, self.log, self.retained, self.accepted_turn = (
            NO_HANDLE,
            0,
            0,
            (),
            0,
        )
        self.kv_limit = self.log_limit = 0
        self.is_fenced = False

    @property
    def peer(self) -> PeerId:
        return self.server.peer

    @property
    def blocks(self) -> tuple[int, int]:
        return self.first, self.last


@dataclass(slots=True)
class Session:
    name: str
    model: str
    epoch: Epoch
    variant: ModelVariant | None = None  # of the servers that this turn runs on
    last_started: Epoch | None = None  # the last one that Go was said for
    is_named: bool = False  # by a client, who may name another one so when this one is over
    epoch_after_stall: Epoch | None = None  # with which it went on after this gateway had slept
    ownership_checked: bool = False  # servers, since then: who has it
    log: list[int] = field(default_factory=list)
    state: SessionState = SessionState.PARKED
    hops: list[Hop] = field(default_factory=list)
    copy_targets: list[Hop] = field(
        default_factory=list
    )  # that a part of the route is being copied to

    turn: Turn = field(default_factory=lambda: Turn(reserved_positions=1, end=1))
    turn_number: int = 0
    read_only: bool = False  # max_tokens 0
    has_run: bool = False  # has run before: what it creates now is a repair
    credit_ahead: int = 64
    read_position: int = 0  # the client has taken entries below this
    credit: int = 0  # last credit sent
    credit_cap: int | None = None  # while it is to move: instead of credit_ahead, to rest soon

    excluded: set[PeerId] = field(default_factory=set)  # refused or silent in this loop
    refusal: RefusalReason = RefusalReason.FAULTS  # why it cannot run, if it cannot
    last_fault: str = ""  # its last fault
    fenced_at: float = 0.0
    overdue_epoch: Epoch | None = (
        None  # the epoch that brought no token in time, until one is blamed
    )
    pending_prefill_rows: int = 0  # rows that its hops had to read at Go, until the first token
    attempts: int = 0  # since the last new token
    overdue_attempts: int = 0  # of these, how many were for want of it
    has_migrated: bool = False  # went over to a copy since the last new token
    is_resumed: bool = False  # the turn goes on where another gateway left it, without a new token
    model_failures: int = 0  # model failures since the last new token
    fault_at: float | None = None  # when the first fault since the last new token came
    held_at: float | None = None
    contested_since: float | None = (
        None  # since when another gateway wants it as well, in lower epochs
    )
    retry_at: float = 0.0
    hold_tries: int = 0
    reused: int = 0  # entries that this turn found in the head's KV
    replayed: int = 0  # entries that it ran again after faults, of unfinished prompts too

    @property
    def length(self) -> int:
        return len(self.log)

    @property
    def is_in_turn(self) -> bool:
        return self.state is not SessionState.PARKED

    @property
    def is_recovering(self) -> bool:
        """In a turn that had begun when its route changed: it is held rather than refused."""
        return self.fault_at is not None or self.has_migrated or self.is_resumed

    def raise_epoch(self) -> None:
        self.epoch = Epoch(self.epoch.counter + 1, self.epoch.gateway)

    def truncate_hops(self, kept: int) -> None:
        """The log's first `kept` entries stand; what a hop holds beyond them is stale (R3)."""
        for hop in [*self.hops, *self.copy_targets]:
            hop.truncate(min(kept, self.length - 1), min(kept, self.length))

    def replace_log(self, tokens: Sequence[int]) -> None:
        """Continue from the longest common prefix of the log and `tokens`."""
        common = common_prefix(self.log, tokens)
        self.log[common:] = tokens[common:]
        self.truncate_hops(common)

    def record_progress(self) -> float | None:
        """A new token came: whatever was counted against the session is forgotten. When its fault began, if one."""
        since, self.fault_at, self.held_at = self.fault_at, None, None
        self.contested_since = None
        self.attempts = self.overdue_attempts = self.model_failures = self.hold_tries = (
            self.pending_prefill_rows
        ) = 0
        self.has_migrated = self.is_resumed = False
        return since

    def record_start(self, head: int, lowest: int) -> None:
        """The head runs the log from `head` on, some hop from `lowest`."""
        if not self.is_recovering:
            self.reused = head
        else:
            self.replayed += max(0, self.length - 1 - lowest)

    def target_credit(self) -> int:
        if self.read_only:
            return max(self.read_position, self.length)
        return self.read_position + self._max_ahead

    @property
    def credit_step(self) -> int:
        """Credit that is worth a message."""
        return max(1, self._max_ahead // 2)

    @property
    def _max_ahead(self) -> int:
        if self.credit_cap is None:
            return self.credit_ahead
        return min(self.credit_ahead, self.credit_cap)

    @property
    def is_quiescent(self) -> bool:
        """The tail holds the newest token: nothing of the session is under way."""
        return not self.read_only and self.length > self.credit


def ring_neighbours(session: Session, hop: Hop) -> frozenset[PeerId]:
    """Return the servers that a hop of the route exchanges rows or tokens with: route and ring make a circle."""
    at = session.hops.index(hop)
    around = session.hops[at - 1], session.hops[(at + 1) % len(session.hops)]
    return frozenset(other.peer for other in around if other is not hop)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
