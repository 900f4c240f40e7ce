"""Live migrations (R13, migration): a session leaves a server that still works, and its client does not notice.

The new hop, or a chain of them, is opened beside the route and receives a KV transfer from the old hop, which keeps
serving. When the copy has nearly caught up, the session gets no more credit and becomes quiescent at a token boundary.
With nothing in flight no work is lost, and the epoch change to the new route takes only its messages' time.
The sessions of one server cut over together (`cutover.py`). Servers are drained by their heartbeats, by
`modelswarm drain` and by callers of `drain`. Ticked by `gateway.py`, which also passes the servers' messages.

A copy stands beside the session (`Session.copy_targets`) and never touches it. A fault of the copy ends the copy. A
recovery that the session enters for another reason wins. Does not know how recovery works (`recovery.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import FaultKind, FaultReport, FenceAck, Window
from modelswarm_gateway.core.interface.effects import Effect, MigrationEnded
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.migration import cutover
from modelswarm_gateway.core.migration.migration import (
    REBALANCE_CAUSE,
    DrainProgress,
    Migration,
    MigrationBackoffs,
    MigrationOutcome,
    involved_servers,
    lag,
    recovery_in_progress,
)
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.recovery.route_planner import can_replace, find_migration_targets
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.drain_causes import SHUTDOWN_CAUSE
from modelswarm_gateway.core.sessions.route_record import wanted_version
from modelswarm_gateway.core.sessions.session import Hop, Session, SessionState, ring_neighbours

# Number of sessions per tick that new hops are searched for.
STARTS_PER_TICK = 8
# Time in seconds before new hops are searched for again if no other server holds the blocks.
NO_TARGET_SECONDS = 0.5
# Number of tokens the swarm may be ahead of the client of a session that is about to migrate.
CREDIT_CAP = 4


class Migrations:
    def __init__(
        self,
        settings: GatewaySettings,
        registry: ServerRegistry,
        recovery: Recovery,
        sessions: Mapping[str, Session],
        emit: Callable[[Effect], None],
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._recovery = recovery
        self._sessions = sessions
        self._emit = emit
        self._migrations: dict[str, Migration] = {}  # by session
        self._backoffs = MigrationBackoffs()
        self._no_target_until: dict[Hashable, float] = {}  # by drained server and needs
        self._capped: set[str] = set()  # sessions with a credit cap set here

    # ---- drained servers

    def drain(self, peer: PeerId, cause: str, now: float) -> None:
        """Migrate the sessions of a server away; it gets new hops only for blocks that no other server holds."""
        self._registry.drain(peer, cause)
        self.advance(now)

    def undrain(self, peer: PeerId, cause: str, now: float) -> None:
        """Take back a `drain` of that cause; copies in progress are discarded."""
        self._registry.undrain(peer, cause)
        self.advance(now)

    def is_draining(self, peer: PeerId, cause: str) -> bool:
        """True while a `drain` of that cause stands."""
        return self._registry.drains.has_cause(peer, cause)

    def drain_progress(self, peer: PeerId) -> DrainProgress | None:
        """Return the progress of a drain; None if the server is not connected."""
        server = self._registry.find_server(peer)
        if server is None:
            return None
        return DrainProgress(
            draining=peer in self._registry.drains.peers,
            hops=self._registry.hops[peer],
            other_hops=server.other_sessions,
            is_empty=server.heartbeat is not None and server.heartbeat.sessions == 0,
            migrating=sum(
                migration.old_hop.peer == peer for migration in self._migrations.values()
            ),
            sole_blocks=tuple(self._registry.sole_blocks_of(peer)),
        )

    # ---- time

    def advance(self, now: float) -> None:
        """Continue all migrations and start new ones; called at every tick."""
        for migration in list(self._migrations.values()):
            self._check(migration, now)
        self._quiesce_batches(now)
        if self._capped or any(map(self._registry.is_connected, self._registry.drains.peers)):
            self._cap_credit()
            self._close_lost_hops()
        hops_left = any(self._registry.hops[peer] for peer in self._registry.drains.peers)
        if hops_left and not recovery_in_progress(self._sessions.values(), now):
            self._start_some(now)
        self._backoffs.keep_only(self._sessions.keys())

    def _cap_credit(self) -> None:
        """Give sessions that are about to migrate little credit, so that they become quiescent soon."""
        draining = self._registry.drains.peers
        for session in self._sessions.values():
            leaves = session.name in self._migrations or any(
                hop.peer in draining for hop in session.hops
            )
            if leaves and session.credit_cap is None:
                session.credit_cap = CREDIT_CAP
                self._capped.add(session.name)
            elif not leaves and session.name in self._capped:
                session.credit_cap = None
                self._capped.discard(session.name)
                self._recovery.hop_messages.grant_credit(session)
        self._capped &= self._sessions.keys()

    def _close_lost_hops(self) -> None:
        """Close replaced hops of parked sessions: no token comes soon, and a drained server would never be empty."""
        for session in self._sessions.values():
            for hop in list(session.lost_hops if session.state is SessionState.PARKED else ()):
                if hop.peer in self._registry.drains.peers:
                    session.lost_hops.remove(hop)
                    self._recovery.hops.close(hop)

    def _check(self, migration: Migration, now: float) -> None:
        if not self._is_current(migration):
            self._stop(migration, MigrationOutcome.SUPERSEDED, now)
        elif migration.is_copying and cutover.is_caught_up(migration):
            self._try_cutover(migration, now)
        elif now - migration.progress_at >= self._settings.copy_stall_seconds:
            self._abort(migration, now)
        elif cutover.quiesce_expired(migration, now):
            self._resume(migration)

    def _is_current(self, migration: Migration) -> bool:
        """True if the session still runs in the migration's epoch, and the hops are still to be exchanged."""
        session = migration.session
        return (
            self._sessions.get(session.name) is session
            and session.epoch == migration.epoch
            and session.state is SessionState.RUNNING
            and (
                migration.cause == REBALANCE_CAUSE
                or migration.old_hop.peer in self._registry.drains.peers
            )
            and not any(hop.peer in self._registry.drains.peers for hop in migration.new_hops)
            and all(self._registry.is_connected(hop.peer) for hop in migration.new_hops)
            and not any(hop.peer in self._registry.suspected for hop in migration.new_hops)
        )

    def _start_some(self, now: float) -> None:
        searched = 0
        busy = self._copies_by_server()
        ready = {  # servers whose batch gets no more sessions
            migration.old_hop.peer
            for migration in self._migrations.values()
            if migration.caught_up_at is not None
        }
        waiting: set[Hashable] = set()  # drained servers and needs whose targets have copies enough
        for session in list(self._sessions.values()):
            hops = (h for h in session.hops if self._may_start(session, h, busy, now))
            hop = next((each for each in hops if _needs_of(session, each) not in waiting), None)
            if hop is None or hop.peer in ready:
                continue
            searched += 1
            if searched > STARTS_PER_TICK:
                return
            if not self._start(session, hop, busy, now):
                waiting.add(_needs_of(session, hop))

    def _copies_by_server(self) -> Counter[PeerId]:
        """Return the number of copies that each server takes part in."""
        return Counter(
            peer for migration in self._migrations.values() for peer in involved_servers(migration)
        )

    def _may_start(self, session: Session, hop: Hop, busy: Counter[PeerId], now: float) -> bool:
        if hop.peer not in self._registry.drains.peers or session.variant is None:
            return False
        if self._no_target_until.get(_needs_of(session, hop), 0.0) > now:
            return False
        if session.state is SessionState.PARKED:
            return True
        if not self._can_migrate(session):
            return False
        if busy[hop.peer] >= self._settings.copies_per_server:
            return False
        return self._backoffs.for_session(session).not_before <= now

    def _can_migrate(self, session: Session) -> bool:
        """True if the session runs, and neither recovers nor migrates."""
        running = session.state is SessionState.RUNNING and not session.is_recovering
        return running and session.name not in self._migrations

    # ---- starting

    def _start(self, session: Session, old: Hop, busy: Counter[PeerId], now: float) -> bool:
        """Let a session leave a hop. Return False if it has to wait for copies of others."""
        backoff = self._backoffs.for_session(session)
        targets = find_migration_targets(self._registry, session, old, backoff.refused_by, now)
        parked = session.state is SessionState.PARKED
        if targets is None and not (
            parked and session.variant != self._registry.active_variant(session.model)
        ):
            left = {each: end for each, end in self._no_target_until.items() if end > now}
            self._no_target_until = {**left, _needs_of(session, old): now + NO_TARGET_SECONDS}
            return True
        if parked or targets is None:
            # No copy: its next turn uses other servers (R8, parked).
            session.hops.remove(old)
            self._recovery.hops.detach(old)
            return True
        with_copy = backoff.failures < self._settings.copy_attempts
        migration = Migration(
            session,
            session.epoch,
            self._registry.drains.first_cause(old.peer),
            old,
            with_copy,
            now,
            progress_at=now,
        )
        return self._open_hops(migration, targets, busy)

    def _open_hops(
        self, migration: Migration, targets: Sequence[RouteHop], busy: Counter[PeerId]
    ) -> bool:
        """Open the new hops of a migration. Return False if a server takes part in enough copies."""
        session, find = migration.session, self._recovery.hops.find_or_create
        migration.new_hops = [find(session, each.peer, each.first, each.last) for each in targets]
        involved = involved_servers(migration)
        if any(busy[peer] >= self._settings.copies_per_server for peer in involved):
            return False
        busy.update(involved)
        self._migrations[session.name] = migration
        self._backoffs.for_session(session).copy_servers.update(
            hop.peer for hop in migration.new_hops
        )
        for hop in migration.new_hops:
            self._recovery.open_copy_target(session, hop)
        return True

    # ---- migrations without a drain

    def is_idle(self, now: float) -> bool:
        """True if no migration is in progress, and no recovery that delays one."""
        return not self._migrations and not recovery_in_progress(self._sessions.values(), now)

    def migrate(self, session: Session, old: Hop, to: PeerId, now: float) -> bool:
        """Migrate a hop to a replica, with a KV copy or not at all. False if the session cannot migrate now."""
        if self._backoffs.for_session(session).failures or not self._can_migrate(session):
            return False
        if not can_replace(self._registry, session, old, to):
            return False
        migration = Migration(
            session, session.epoch, REBALANCE_CAUSE, old, True, now, progress_at=now
        )
        return self._open_hops(migration, [RouteHop(to, *old.blocks)], self._copies_by_server())

    # ---- messages

    def on_fence_ack(self, peer: PeerId, answer: FenceAck, now: float) -> None:
        """Take an ack that recovery has recorded: start the copy once all new hops are open."""
        migration = self._migration_of(answer.handle)
        if (
            migration is None
            or answer.epoch != migration.epoch
            or migration.is_copying
            or not self._is_current(migration)
        ):
            return
        if answer.unknown or answer.refusal is not None:
            self._backoffs.for_session(migration.session).refused_by.add(peer)
            self._abort(migration, now)
        elif all(hop.is_fenced for hop in migration.new_hops):
            for hop in migration.new_hops:
                hop.accepted_turn = migration.session.turn_number
            migration.is_copying, migration.progress_at = True, now
            if migration.with_copy:
                self._start_copy(migration)
            else:
                self._cut_over(migration, now)

    def _start_copy(self, migration: Migration) -> None:
        """Start the new hops as standbys, and make the old hop send them its KV."""
        session, old = migration.session, migration.old_hop
        for hop in migration.new_hops:
            self._recovery.hop_messages.start_copy(session, old, hop)
            migration.kv_positions[hop.gateway_handle] = hop.kv
            migration.log_sent[hop.gateway_handle] = hop.log
        self._send_log(migration)

    def _send_log(self, migration: Migration) -> None:
        """Send the new entries of the input log to a new head and a new tail."""
        head, tail = migration.session.blocks
        for hop in migration.new_hops:
            if hop.first == head or hop.last == tail:
                self._recovery.hop_messages.send_log(
                    migration.session, hop, migration.log_sent[hop.gateway_handle], standby=True
                )
                migration.log_sent[hop.gateway_handle] = migration.session.length

    def on_token(self, session: Session, now: float) -> None:
        """Take a new token of a session: it may be the one at which the session is quiescent."""
        migration = self._migrations.get(session.name)
        if migration is not None and migration.is_copying and self._is_current(migration):
            self._send_log(migration)
            self._try_cutover(migration, now)

    def on_window(self, peer: PeerId, window: Window, now: float) -> None:
        """Take a window of a new hop, which has the position its KV copy has reached."""
        migration = self._migration_of(window.handle)
        if migration is None or not migration.is_copying or window.epoch != migration.epoch:
            return
        _, hop = self._recovery.hops.by_handle[window.handle]
        if peer != hop.peer or not self._is_current(migration):
            return
        migration.kv_positions[window.handle] = max(
            migration.kv_positions[window.handle], window.received
        )
        missing = lag(migration)
        if missing < migration.min_lag:
            migration.min_lag, migration.progress_at = missing, now
        self._try_cutover(migration, now)

    def _try_cutover(self, migration: Migration, now: float) -> None:
        """Cut over if the copy has caught up and the session is ready."""
        if not cutover.is_caught_up(migration):
            return
        migration.progress_at = now
        if migration.caught_up_at is None:
            migration.caught_up_at = now
        if cutover.should_cut_over(migration, now):
            self._cut_over(migration, now)

    def _quiesce_batches(self, now: float) -> None:
        """Quiesce the sessions whose copies are ready.

        Done in a tick and not at a token. Sessions that share steps get their tokens one after the other, and must
        become quiescent after the same one.
        """
        for batch in cutover.ready_batches(list(self._migrations.values()), now):
            self._recovery.hop_messages.quiesce([migration.session for migration in batch])
            for migration in batch:
                migration.quiescing_since = now
                self._try_cutover(migration, now)

    def _resume(self, migration: Migration) -> None:
        """Let a quiescent session go on for a while, because its copy has fallen behind."""
        migration.quiescing_since = migration.quiescent_since = None
        self._grant_capped_credit(migration.session)

    def _grant_capped_credit(self, session: Session) -> None:
        """Grant a little credit; `_cap_credit` removes the cap at the next tick unless the session must migrate."""
        session.credit_cap = CREDIT_CAP
        self._capped.add(session.name)
        self._recovery.hop_messages.grant_credit(session)

    def _cut_over(self, migration: Migration, now: float) -> None:
        del self._migrations[migration.session.name]
        self._backoffs.pop(migration.session.name, None)
        copied = migration.with_copy
        outcome = MigrationOutcome.MIGRATED if copied else MigrationOutcome.RECOMPUTED
        self._emit_outcome(migration, outcome, now)
        self._recovery.cut_over(migration.session, migration.old_hop, migration.new_hops, now)

    # ---- faults

    def handle_report(self, peer: PeerId, report: FaultReport, now: float) -> bool:
        """Take a fault report. True if it concerns only a copy, or announces a drain: neither harms a session."""
        found = self._recovery.hops.by_handle.get(report.handle)
        if found is None or found[1].peer != peer:
            return False
        session, hop = found
        if report.kind is FaultKind.DRAINING:
            self._registry.drain(peer, SHUTDOWN_CAUSE)
            return True
        migration = self._migrations.get(session.name)
        if hop in session.copy_targets:
            if migration is not None and report.epoch == migration.epoch:
                self._abort(migration, now)
            return True
        if report.epoch != session.epoch or not self._is_copy_fault(session, hop, report):
            return False
        if migration is not None:
            self._abort(migration, now)
        return True

    def _is_copy_fault(self, session: Session, hop: Hop, report: FaultReport) -> bool:
        """True if the reported link leads to the target of a copy in this epoch, and to no neighbour in the route.

        If it leads to both, a failed read is attributed to the copy.
        """
        targets = self._backoffs.for_session(session).copy_servers
        if report.peer not in targets or hop not in session.hops:
            return False
        migration = self._migrations.get(session.name)
        copied = migration is not None and migration.is_copying and migration.old_hop is hop
        return report.peer not in ring_neighbours(session, hop) or (
            copied and report.kind is FaultKind.FAILED
        )

    def _abort(self, migration: Migration, now: float) -> None:
        """End a migration whose copy failed. It is tried again elsewhere or later, and at last without a copy."""
        self._stop(migration, MigrationOutcome.ABORTED, now)

    def _stop(self, migration: Migration, outcome: MigrationOutcome, now: float) -> None:
        """End a migration, and let some time pass before the next one of the session."""
        self._discard(migration, outcome, now)
        failed = outcome is MigrationOutcome.ABORTED
        backoff = self._backoffs.for_session(migration.session)
        backoff.postpone(now, self._settings.migration_retry_seconds, failed=failed)

    def _discard(self, migration: Migration, outcome: MigrationOutcome, now: float) -> None:
        """Close the new hops and report the outcome."""
        session = migration.session
        del self._migrations[session.name]
        if self._sessions.get(session.name) is session:
            self._grant_capped_credit(session)
        if migration.with_copy and migration.is_copying and session.epoch == migration.epoch:
            self._recovery.hop_messages.stop_copies(session, migration.old_hop)
        for hop in migration.new_hops:
            if hop in session.copy_targets:
                session.copy_targets.remove(hop)
                self._recovery.hops.detach(hop)
        self._emit_outcome(migration, outcome, now)

    # ---- look-up and outcome

    def _migration_of(self, handle: int) -> Migration | None:
        """Return the migration with a new hop of this gateway handle."""
        found = self._recovery.hops.by_handle.get(handle)
        migration = None if found is None else self._migrations.get(found[0].name)
        if migration is None or found is None or found[1] not in migration.new_hops:
            return None
        return migration

    def _emit_outcome(self, migration: Migration, outcome: MigrationOutcome, now: float) -> None:
        seconds = now - migration.started_at
        self._emit(
            MigrationEnded(
                migration.session.name,
                migration.old_hop.peer,
                migration.cause,
                outcome.value,
                seconds,
            )
        )


def _needs_of(session: Session, hop: Hop) -> Hashable:
    """Return what decides whether another server can have the hop: sessions with other needs may find one."""
    return hop.peer, session.variant, wanted_version(session), session.turn.prompt_rows > 0
