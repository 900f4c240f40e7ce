"""Planned moves (R13): a session leaves a server that still works, and its reader does not notice.

The new hop, or a chain of them, is opened beside the route and takes a copy of the KV of the old one, while that
serves; when it is nearly there, the swarm is given no more credit, so that the session comes to rest at a token: with
nothing under way no work is lost, and the loop with the new route takes no longer than its messages do. Those of a
server go over together (`waves.py`). Ticked and told what servers say by `gateway.py`; servers to be left are named by
beats, by `modelswarm drain` and by whoever calls `leave`.
A copy stands beside the session (`Session.spare`) and never touches it: whatever goes wrong with it ends the copy, and
a loop that the session enters for another reason wins. Does not know how a loop is run (`recovery.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import FaultKind, FaultReport, FenceAck, Window
from modelswarm_gateway.core.interface.effects import Effect, Moved
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.migration import cutover
from modelswarm_gateway.core.migration.migration import (
    BALANCE,
    MigrationOutcome,
    Migration,
    DrainProgress,
    MigrationBackoffs,
    lag,
    beside,
    involved_servers,
    recovery_in_progress,
)
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.recovery.route_planner import places
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.drain_causes import STOPPING
from modelswarm_gateway.core.sessions.session import Hop, Session, State

STARTS_PER_TICK = 8  # sessions that are looked at for a place elsewhere, at most
NO_TARGET_SECONDS = 0.5  # a server whose blocks nobody else has is looked at again after this
CREDIT_CAP = 4  # tokens that the swarm may be ahead of the reader of a session that is to move


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
        self._no_target_until: dict[PeerId, float] = {}  # until when it is not asked again
        self._capped: set[str] = set()  # sessions that are to move, or were

    # ---- servers to be left

    def drain(self, peer: PeerId, cause: str, now: float) -> None:
        """Its sessions are moved elsewhere, and new ones go there only if nobody else holds a block."""
        self._registry.drain(peer, cause)
        self.advance(now)

    def undrain(self, peer: PeerId, cause: str, now: float) -> None:
        """Takes back a `leave` of that cause; copies under way come to nothing."""
        self._registry.undrain(peer, cause)
        self.advance(now)

    def is_draining(self, peer: PeerId, cause: str) -> bool:
        """Whether a `leave` of that cause stands."""
        return self._registry.drains.has_cause(peer, cause)

    def drain_progress(self, peer: PeerId) -> DrainProgress | None:
        """How far it is with a server; None: it is not linked."""
        server = self._registry.get(peer)
        if server is None:
            return None
        return DrainProgress(
            draining=peer in self._registry.drains.peers,
            hops=self._registry.hops[peer],
            other_hops=server.other_sessions,
            is_empty=server.heartbeat is not None and server.heartbeat.sessions == 0,
            migrating=sum(move.old_hop.peer == peer for move in self._migrations.values()),
            sole_blocks=tuple(self._registry.sole_blocks_of(peer)),
        )

    # ---- time

    def advance(self, now: float) -> None:
        for move in list(self._migrations.values()):
            self._check(move, now)
        self._quiesce_batches(now)
        if self._registry.drains.peers or self._capped:
            self._cap_credit()
        if any(self._registry.hops[peer] for peer in self._registry.drains.peers) and not recovery_in_progress(
            self._sessions.values()
        ):
            self._start_some(now)
        self._backoffs.keep_only(self._sessions.keys())

    def _cap_credit(self) -> None:
        """A session that is to move has little credit out, so that it comes to rest soon; all others have theirs."""
        left = self._registry.drains.peers
        for session in self._sessions.values():
            leaves = session.name in self._migrations or any(hop.peer in left for hop in session.hops)
            if leaves and session.credit_cap is None:
                session.credit_cap = CREDIT_CAP
                self._capped.add(session.name)
            elif not leaves and session.name in self._capped:
                session.credit_cap = None
                self._capped.discard(session.name)
                self._recovery.orders.credit(session)
        self._capped &= self._sessions.keys()

    def _check(self, move: Migration, now: float) -> None:
        if not self._is_current(move):
            self._stop(move, MigrationOutcome.SUPERSEDED, now)
        elif move.is_copying and cutover.is_caught_up(move):
            self._try_cutover(move, now)
        elif now - move.progress_at >= self._settings.copy_seconds:
            self._abort(move, now)
        elif cutover.quiesce_expired(move, now):
            self._resume(move)

    def _is_current(self, move: Migration) -> bool:
        """Whether the session still runs as it did when the move began, and the old hop is still to be left."""
        session = move.session
        return (
            self._sessions.get(session.name) is session
            and session.epoch == move.epoch
            and session.state is State.RUNNING
            and (move.cause == BALANCE or move.old_hop.peer in self._registry.drains.peers)
            and not any(hop.peer in self._registry.drains.peers for hop in move.new_hops)
            and all(self._registry.is_connected(hop.peer) for hop in move.new_hops)
            and not any(hop.peer in self._registry.suspected for hop in move.new_hops)
        )

    def _start_some(self, now: float) -> None:
        looked_at = 0
        busy = self._copies_by_server()
        closed = {move.old_hop.peer for move in self._migrations.values() if move.caught_up_at is not None}
        for session in list(self._sessions.values()):
            hop = next((h for h in session.hops if self._may_start(session, h, busy, now)), None)
            if hop is None or hop.peer in closed:
                continue
            looked_at += 1
            if looked_at > STARTS_PER_TICK:
                return
            self._start(session, hop, busy, now)

    def _copies_by_server(self) -> Counter[PeerId]:
        """By server, in how many copies it has a part."""
        return Counter(peer for move in self._migrations.values() for peer in involved_servers(move))

    def _may_start(self, session: Session, hop: Hop, busy: Counter[PeerId], now: float) -> bool:
        if hop.peer not in self._registry.drains.peers or session.variant is None:
            return False
        if self._no_target_until.get(hop.peer, 0.0) > now:
            return False
        if session.state is State.PARKED:
            return True
        if session.state is not State.RUNNING or session.mending or session.name in self._migrations:
            return False
        if busy[hop.peer] >= self._settings.copies_per_server:
            return False
        return self._backoffs.for_session(session).not_before <= now

    # ---- one move

    def _start(self, session: Session, old: Hop, busy: Counter[PeerId], now: float) -> None:
        legs = places(self._registry, session, old, self._backoffs.for_session(session).refused_by, now)
        parked = session.state is State.PARKED
        if legs is None and not (parked and session.variant != self._registry.active_variant(session.model)):
            self._no_target_until[old.peer] = now + NO_TARGET_SECONDS
            return
        if parked or legs is None:  # no copy: its next turn goes elsewhere (R8)
            session.hops.remove(old)
            self._recovery.hops.leave(old)
            return
        rest = self._backoffs.for_session(session)
        warm = rest.failures < self._settings.copy_tries
        move = Migration(
            session, session.epoch, self._registry.drains.first_cause(old.peer), old, warm, now, progress_at=now
        )
        self._open_hops(move, legs, busy)

    def _open_hops(self, move: Migration, legs: Sequence[RouteHop], busy: Counter[PeerId]) -> None:
        session, find = move.session, self._recovery.hops.find
        move.new_hops = [find(session, leg.peer, leg.first, leg.last) for leg in legs]
        if any(busy[peer] >= self._settings.copies_per_server for peer in involved_servers(move)):
            return
        busy.update(involved_servers(move))
        self._migrations[session.name] = move
        self._backoffs.for_session(session).copy_targets.update(hop.peer for hop in move.new_hops)
        for hop in move.new_hops:
            self._recovery.open_beside(session, hop)

    # ---- a session that had better be elsewhere, although its server goes on

    @property
    def is_idle(self) -> bool:
        return not self._migrations and not recovery_in_progress(self._sessions.values())

    def migrate(self, session: Session, old: Hop, to: PeerId, now: float) -> bool:
        """Moves it to an equal server, with a copy or not at all. False: this one cannot go now."""
        rest = self._backoffs.for_session(session)
        if session.state is not State.RUNNING or session.mending or session.name in self._migrations:
            return False
        if rest.failures:
            return False
        move = Migration(session, session.epoch, BALANCE, old, True, now, progress_at=now)
        self._open_hops(move, [RouteHop(to, *old.blocks)], self._copies_by_server())
        return True

    def on_fence_ack(self, peer: PeerId, answer: FenceAck, now: float) -> None:
        """An answer that the loop has taken note of."""
        move = self._migration_of(answer.handle)
        if move is None or answer.epoch != move.epoch or move.is_copying or not self._is_current(move):
            return
        if answer.unknown or answer.refusal is not None:
            self._backoffs.for_session(move.session).refused_by.add(peer)
            self._abort(move, now)
        elif all(hop.answered for hop in move.new_hops):
            for hop in move.new_hops:
                hop.turn = move.session.turn_number
            move.is_copying, move.progress_at = True, now
            if move.with_copy:
                self._start_copy(move)
            else:
                self._cut_over(move, now)

    def _start_copy(self, move: Migration) -> None:
        """The new hops go, warm, and the old one is told to send them its KV."""
        session, old = move.session, move.old_hop
        for hop in move.new_hops:
            self._recovery.orders.copy(session, old, hop)
            move.kv_positions[hop.reply] = hop.kv
            move.log_sent[hop.reply] = hop.log
        self._send_log(move)

    def _send_log(self, move: Migration) -> None:
        """Log entries for a new head and a new tail."""
        kind = move.session.variant
        assert kind is not None, "a session that runs has a kind"
        for hop in move.new_hops:
            if hop.first == 0 or hop.last == kind.n_blocks:
                self._recovery.orders.log(move.session, hop, move.log_sent[hop.reply], warm=True)
                move.log_sent[hop.reply] = move.session.length

    def on_token(self, session: Session, now: float) -> None:
        """A new token: perhaps the one that it comes to rest at."""
        move = self._migrations.get(session.name)
        if move is not None and move.is_copying and self._is_current(move):
            self._send_log(move)
            self._try_cutover(move, now)

    def on_window(self, peer: PeerId, window: Window, now: float) -> None:
        """A new hop says how far it is."""
        move = self._migration_of(window.handle)
        if move is None or not move.is_copying or window.epoch != move.epoch:
            return
        if peer != self._recovery.replies[window.handle][1].peer or not self._is_current(move):
            return
        move.kv_positions[window.handle] = max(move.kv_positions[window.handle], window.received)
        missing = lag(move)
        if missing < move.min_lag:
            move.min_lag, move.progress_at = missing, now
        self._try_cutover(move, now)

    def _try_cutover(self, move: Migration, now: float) -> None:
        """Perhaps it is time to go over."""
        if not cutover.is_caught_up(move):
            return
        move.progress_at = now
        if move.caught_up_at is None:
            move.caught_up_at = now
        if cutover.should_cut_over(move, now):
            self._cut_over(move, now)

    def _quiesce_batches(self, now: float) -> None:
        """In a tick, not with a token: those that share steps get theirs one after the other, and are to rest after the
        same one."""
        for wave in cutover.ready_batches(list(self._migrations.values()), now):
            self._recovery.orders.quiesce([move.session for move in wave])
            for move in wave:
                move.quiescing_since = now
                self._try_cutover(move, now)

    def _resume(self, move: Migration) -> None:
        """The session, for a while."""
        move.quiescing_since = move.quiescent_since = None
        self._grant_capped_credit(move.session)

    def _grant_capped_credit(self, session: Session) -> None:
        """Little, until the next look at who is to move."""
        session.credit_cap = CREDIT_CAP
        self._capped.add(session.name)
        self._recovery.orders.credit(session)

    def _cut_over(self, move: Migration, now: float) -> None:
        del self._migrations[move.session.name]
        self._backoffs.pop(move.session.name, None)
        self._emit_outcome(move, MigrationOutcome.MIGRATED if move.with_copy else MigrationOutcome.RECOMPUTED, now)
        self._recovery.move(move.session, move.old_hop, move.new_hops, now)

    # ---- what goes wrong

    def handle_report(self, peer: PeerId, report: FaultReport, now: float) -> bool:
        """Whether a report is about a copy or says that a server leaves: no session suffers from either."""
        found = self._recovery.replies.get(report.handle)
        if found is None or found[1].peer != peer:
            return False
        session, hop = found
        if report.kind is FaultKind.DRAINING:
            self._registry.drain(peer, STOPPING)
            return True
        move = self._migrations.get(session.name)
        if hop in session.spare:
            if move is not None and report.epoch == move.epoch:
                self._abort(move, now)
            return True
        if report.epoch != session.epoch or not self._is_copy_fault(session, hop, report):
            return False
        if move is not None:
            self._abort(move, now)
        return True

    def _is_copy_fault(self, session: Session, hop: Hop, report: FaultReport) -> bool:
        """The link named leads to where a copy goes, or went in this epoch, and to no neighbour in the route. Where it
        leads to both, a read that failed is the copy's."""
        if report.peer not in self._backoffs.for_session(session).copy_targets or hop not in session.hops:
            return False
        move = self._migrations.get(session.name)
        copied = move is not None and move.is_copying and move.old_hop is hop
        return report.peer not in beside(session, hop) or (
            copied and report.kind is FaultKind.FAILED
        )

    def _abort(self, move: Migration, now: float) -> None:
        """Tried again, elsewhere or later; after a few times without a copy."""
        self._stop(move, MigrationOutcome.ABORTED, now)

    def _stop(self, move: Migration, how: MigrationOutcome, now: float) -> None:
        self._discard(move, how, now)
        rest = self._backoffs.for_session(move.session)
        rest.postpone(now, self._settings.move_seconds, failed=how is MigrationOutcome.ABORTED)

    def _discard(self, move: Migration, how: MigrationOutcome, now: float) -> None:
        """Takes away what stands beside the session."""
        session = move.session
        del self._migrations[session.name]
        if self._sessions.get(session.name) is session:
            self._grant_capped_credit(session)
        if move.with_copy and move.is_copying and session.epoch == move.epoch:
            self._recovery.orders.end_copies(session, move.old_hop)
        for hop in move.new_hops:
            if hop in session.spare:
                session.spare.remove(hop)
                self._recovery.hops.leave(hop)
        self._emit_outcome(move, how, now)

    # ---- helpers

    def _migration_of(self, handle: int) -> Migration | None:
        """The move whose new hop has that name."""
        found = self._recovery.replies.get(handle)
        move = None if found is None else self._migrations.get(found[0].name)
        if move is None or found is None or found[1] not in move.new_hops:
            return None
        return move

    def _emit_outcome(self, move: Migration, how: MigrationOutcome, now: float) -> None:
        seconds = now - move.started_at
        self._emit(Moved(move.session.name, move.old_hop.peer, move.cause, how.value, seconds))
