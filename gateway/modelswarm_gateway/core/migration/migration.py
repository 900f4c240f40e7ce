"""One planned move (R13) as `moves.py` keeps it: what it is, how it ended, and what earlier ones have taught."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm_gateway.core.sessions.session import Hop, Session, State

BALANCE = "balance"  # why a session leaves a server that goes on: an equal one has less to do


class MigrationOutcome(enum.Enum):
    """How a move ended."""

    MIGRATED = "moved"  # with a copy
    RECOMPUTED = "rebuilt"  # without one: the loop had to run the rows again
    ABORTED = "dropped"  # the copy failed or got no nearer; tried again later
    SUPERSEDED = "overtaken"  # a fault, or the end of the turn, came first


@dataclass(slots=True)
class Migration:
    """One session on its way from a hop to new ones for the same blocks."""

    session: Session
    epoch: Epoch
    cause: str
    old_hop: Hop
    with_copy: bool  # with a copy
    started_at: float
    new_hops: list[Hop] = field(default_factory=list)
    is_copying: bool = False  # all new hops are open
    min_lag: int = 1 << 60  # positions; the least so far
    progress_at: float = 0.0  # when it last shrank
    caught_up_at: float | None = None  # when the new hops first had nearly all
    quiescing_since: float | None = None  # when the session was told to come to rest
    quiescent_since: float | None = None  # when it did
    kv_positions: dict[int, int] = field(default_factory=dict)  # of the new hops, by reply
    log_sent: dict[int, int] = field(default_factory=dict)  # log entries that head and tail were sent


@dataclass(slots=True)
class MigrationBackoff:
    """What earlier moves of a session have taught."""

    epoch: Epoch
    failures: int = 0
    not_before: float = 0.0
    refused_by: set[PeerId] = field(default_factory=set)
    copy_targets: set[PeerId] = field(default_factory=set)  # of copies in `epoch`

    def postpone(self, now: float, pause: float, *, failed: bool) -> None:
        """Before the next try. A move that was overtaken says nothing against copies."""
        self.not_before = now + pause * 2 ** min(self.failures, 5)
        self.failures += failed


class MigrationBackoffs(dict[str, MigrationBackoff]):
    """By session."""

    def for_session(self, session: Session) -> MigrationBackoff:
        rest = self.setdefault(session.name, MigrationBackoff(session.epoch))
        if rest.epoch != session.epoch:
            rest.epoch = session.epoch
            rest.copy_targets.clear()
        return rest

    def keep_only(self, sessions: Collection[str]) -> None:
        for name in self.keys() - sessions:
            del self[name]


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far a server has been left."""

    draining: bool
    hops: int  # of this gateway, that are still there
    other_hops: int  # of other gateways
    is_empty: bool  # the server itself says that there are none
    migrating: int
    sole_blocks: tuple[int, ...]  # blocks that no other server holds: nobody leaves


def lag(migration: Migration) -> int:
    """Positions that a new hop lacks of those that a loop would have it hold."""
    return migration.session.length - 1 - min(migration.kv_positions.values())


def beside(session: Session, hop: Hop) -> frozenset[PeerId]:
    """Servers that a hop of the route exchanges rows or tokens with: route and ring make a circle."""
    at = session.hops.index(hop)
    around = session.hops[at - 1], session.hops[(at + 1) % len(session.hops)]
    return frozenset(other.peer for other in around if other is not hop)


def recovery_in_progress(sessions: Iterable[Session]) -> bool:
    """Whether any is under way: they come before moves."""
    states = (State.FENCING, State.RUNNING)
    return any(s.fault_at is not None and s.state in states for s in sessions)


def involved_servers(migration: Migration) -> set[PeerId]:
    """Servers that have work with it."""
    return {migration.old_hop.peer, *(hop.peer for hop in migration.new_hops)}
