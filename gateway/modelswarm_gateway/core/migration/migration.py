"""One live migration (R13, migration): its state, its outcome, and the back-off after failed ones.

Kept by `migrations.py`. Sends no message and decides nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm_gateway.core.sessions.session import Hop, Session, SessionState

# Cause of a migration away from a server that is not drained: a replica has less load.
REBALANCE_CAUSE = "rebalance"
# Time in seconds for which a recovery delays migrations. A long replay takes minutes, and a reader may pause for ever.
RECOVERY_SECONDS = 10.0


class MigrationOutcome(enum.Enum):
    """The outcome of a migration."""

    MIGRATED = "migrated"  # with a copy
    RECOMPUTED = "recomputed"  # without a copy: the new hops ran the rows again
    ABORTED = "aborted"  # the copy failed or made no progress; tried again later
    SUPERSEDED = "superseded"  # a fault or the end of the turn came first


@dataclass(slots=True)
class Migration:
    """One session on its way from a hop to new ones for the same blocks."""

    session: Session
    epoch: Epoch
    cause: str
    old_hop: Hop
    with_copy: bool
    started_at: float
    new_hops: list[Hop] = field(default_factory=list)
    is_copying: bool = False  # all new hops are open
    min_lag: int = 1 << 60  # positions; the least lag so far
    progress_at: float = 0.0  # time at which the lag last shrank
    caught_up_at: float | None = None  # time at which the copy first had caught up
    quiescing_since: float | None = None  # time at which credit was stopped
    quiescent_since: float | None = None
    kv_positions: dict[int, int] = field(default_factory=dict)  # of the new hops, by gateway handle
    log_sent: dict[int, int] = field(
        default_factory=dict
    )  # log entries sent to a new head or tail, by handle


@dataclass(slots=True)
class MigrationBackoff:
    """The failed migrations of a session, and the time before which no other one starts."""

    epoch: Epoch
    failures: int = 0
    not_before: float = 0.0
    refused_by: set[PeerId] = field(default_factory=set)  # servers that refused a new hop
    copy_servers: set[PeerId] = field(default_factory=set)  # servers that a copy in `epoch` went to

    def postpone(self, now: float, pause: float, *, failed: bool) -> None:
        """Wait before the next migration. A superseded migration counts as no failure of its copy."""
        self.not_before = now + pause * 2 ** min(self.failures, 5)
        self.failures += failed


class MigrationBackoffs(dict[str, MigrationBackoff]):
    """Back-offs by session name."""

    def for_session(self, session: Session) -> MigrationBackoff:
        """Return the back-off of a session; copies of earlier epochs are forgotten."""
        backoff = self.setdefault(session.name, MigrationBackoff(session.epoch))
        if backoff.epoch != session.epoch:
            backoff.epoch = session.epoch
            backoff.copy_servers.clear()
        return backoff

    def keep_only(self, sessions: Collection[str]) -> None:
        for name in self.keys() - sessions:
            del self[name]


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """The progress of a drain."""

    draining: bool
    hops: int  # of this gateway, still on the server
    other_hops: int  # of other gateways
    is_empty: bool  # the server reports no sessions
    migrating: int  # sessions of this gateway in migration
    sole_blocks: tuple[int, ...]  # blocks that no other server holds: their sessions stay


def lag(migration: Migration) -> int:
    """Return the number of positions that the slowest new hop lacks for a cutover."""
    return migration.session.quiescent_kv - min(migration.kv_positions.values())


def recovery_in_progress(sessions: Iterable[Session], now: float) -> bool:
    """True if a recovery is in progress that delays migrations."""
    states, since = (SessionState.FENCING, SessionState.RUNNING), now - RECOVERY_SECONDS
    return any(
        s.fault_at is not None and s.fault_at > since and s.state in states for s in sessions
    )


def involved_servers(migration: Migration) -> set[PeerId]:
    """Return the servers that a migration gives work to."""
    return {migration.old_hop.peer, *(hop.peer for hop in migration.new_hops)}
