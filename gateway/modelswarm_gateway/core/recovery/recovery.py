"""Failover of a stream to other servers: the recovery loop (R5) for every cause.

One round: fence all hops, create new ones → FenceAcks → plan → StartEpoch.

Called by `gateway.py`, `detection/` and `migration/` with a session and what happened; it changes the session and emits
effects. A held session (no server for a block, or no room) is inside the loop. It enters the loop again when something
changes or its pause ends. Does not know how faults are detected or how routes are costed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from modelswarm.protocol.identity import NO_EPOCH, NO_HANDLE, PeerId
from modelswarm.protocol.messages import FaultKind, FaultReport, FenceAck, Refusal
from modelswarm.protocol.opaque import is_opaque
from modelswarm_gateway.core.interface.effects import (
    Effect,
    OwnershipLost,
    Refused,
    Rerouted,
    SessionLost,
)
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import RefusalReason
from modelswarm_gateway.core.recovery.fault_attribution import attribute_overdue
from modelswarm_gateway.core.recovery.hold_limit import HoldLimits
from modelswarm_gateway.core.recovery.ownership_check import OwnershipCheck
from modelswarm_gateway.core.recovery.refusals import REASONS, explain_refusal, retry_seconds
from modelswarm_gateway.core.recovery.route_planner import RoutePlanner
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.drain_causes import SHUTDOWN_CAUSE
from modelswarm_gateway.core.servers.variant import ModelVariant, variants_of
from modelswarm_gateway.core.sessions.hop_messages import HopMessages
from modelswarm_gateway.core.sessions.hop_table import HopTable
from modelswarm_gateway.core.sessions.prompt_scores import truncate_unscored
from modelswarm_gateway.core.sessions.replay_plan import HopState, restart_points
from modelswarm_gateway.core.sessions.returned_rows import truncate_missing
from modelswarm_gateway.core.sessions.route_record import classes_of, record_route
from modelswarm_gateway.core.sessions.session import (
    NO_TRUNCATION,
    Hop,
    Session,
    SessionState,
    longest_chain,
)
from modelswarm_gateway.core.sessions.turn_start import check_replaceable


class Recovery:
    """The recovery loop of all sessions; the session is an argument of each call."""

    def __init__(
        self,
        settings: GatewaySettings,
        registry: ServerRegistry,
        hold_limits: HoldLimits,
        ownership_check: OwnershipCheck,
        draw: Callable[[], int],
        emit: Callable[[Effect], None],
        forget: Callable[[Session], None],
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._hold_limits = hold_limits
        self._ownership_check = ownership_check
        self._emit = emit
        self._forget = forget  # removes a lost session from the core's table
        self._planner = RoutePlanner(settings, registry)
        self.hops = HopTable(registry, draw, emit)
        self.hop_messages = HopMessages(settings, emit)

    # ---- entering the loop

    def on_fault(self, session: Session, cause: str, peer: PeerId, now: float) -> None:
        """Record a fault and enter the loop. A parked session recovers when it is used next (R8, parked)."""
        if not session.is_in_turn:
            return
        session.last_fault = f"{cause} at {peer}"
        if session.fault_at is None:
            session.fault_at = now
        if session.state is not SessionState.HELD:
            session.reroutes += 1
            self._emit(Rerouted(session.name, cause, peer))
        self.enter_loop(session, now)

    def enter_loop(self, session: Session, now: float) -> None:
        """Freeze the log's length, raise the epoch (R4, freeze), and fence every hop of a complete route."""
        session.raise_epoch()
        session.credit_cap = None
        session.attempts += 1
        session.truncate_hops(session.length)
        truncate_unscored(session)
        truncate_missing(session)
        for hop in session.owned_hops:
            hop.is_fenced, hop.is_round_trip_timed = False, True
        was_held = session.state is SessionState.HELD  # its attempts have paused already
        if session.attempts % self._settings.attempts_without_token == 0 and not was_held:
            session.refusal = RefusalReason.FAULTS
            self.hold(session, now)
        elif self._complete_route(session, now):
            if self._ownership_check.awaits_answers(session, now):
                session.state = SessionState.HELD
            else:
                session.state, session.fenced_at = SessionState.FENCING, now
                self.send_fences(session, now)

    def cut_over(self, session: Session, old: Hop, new: list[Hop], now: float) -> None:
        """Replace a hop by the new hops of its migration (R13, migration) and enter the loop with them."""
        at = session.hops.index(old)
        self._set_route(session, [*session.hops[:at], *new, *session.hops[at + 1 :]])
        session.has_migrated = True
        self.enter_loop(session, now)

    def open_copy_target(self, session: Session, hop: Hop) -> None:
        """Open a hop beside the route, in the session's present epoch, from the room reserved for recovery."""
        self.hops.attach(session, hop)
        session.copy_targets.append(hop)
        hop.is_fenced = False
        self.hop_messages.send_fence(session, hop, for_recovery=True)

    def park(self, session: Session, *, refused: bool = False) -> None:
        """Fence without StartEpoch (R8, parked). After a refusal hops also give back what the turn was granted."""
        session.raise_epoch()
        session.credit_cap, session.before = None, None
        session.state = SessionState.PARKED
        releases = refused and not session.turn.session_length
        session.truncate_hops(session.length)
        for hop in [*session.hops, *session.lost_hops]:
            hop.is_fenced = False
            if self._registry.is_connected(hop.peer) and hop.server_handle != NO_HANDLE:
                self.hop_messages.send_fence(session, hop, parked=True, released=releases)

    # ---- the route

    def _complete_route(self, session: Session, now: float) -> bool:
        """Replace lost hops so that the route covers all blocks. Return False if the session was held or refused."""
        plan = self._planner.plan_route(session, self._registry.suspected, now)
        if plan is None and self._registry.suspected:  # last resort: they may answer after all
            plan = self._planner.plan_route(session, frozenset(), now)
        if plan is None:
            self._no_route(session, now)
            return False
        self._set_route(session, [self._hop_for(session, each) for each in plan])
        return True

    def _hop_for(self, session: Session, planned: Hop | RouteHop) -> Hop:
        if isinstance(planned, Hop):
            return planned
        hop = self.hops.find_or_create(session, planned.peer, planned.first, planned.last)
        hop.route_hop = planned
        return hop

    def _set_route(self, session: Session, route: list[Hop]) -> None:
        """Set the route. Replaced hops stay open until another one is known to have their log (R20, takeover)."""
        for hop in [*session.hops, *session.copy_targets]:
            may_have_log = session.has_run and hop.server_handle != NO_HANDLE
            if hop not in route and hop in session.hops and may_have_log:
                self.hops.replace(session, hop)
            elif hop not in route:
                self.hops.detach(hop)
        for hop in route:
            self.hops.attach(session, hop)
        session.hops, session.copy_targets = route, []

    def close_hops(self, session: Session) -> None:
        """Close every hop, so that all connected servers free its pages."""
        for hop in [*session.hops, *session.copy_targets]:
            self.hops.detach(hop)
        for hop in session.lost_hops:
            self.hops.close(hop)
        session.hops, session.copy_targets, session.lost_hops = [], [], []

    def close_lost_hops(self, session: Session) -> None:
        """Close replaced hops whose log a hop of the route has. A late answer to a Fence may name another owner.

        Before a turn starts they stay open, because a refused turn restores the route.
        """
        if session.before is not None:
            return
        log = max((hop.log for hop in session.hops if hop.is_fenced), default=0)
        for hop in list(session.lost_hops):
            if hop.log_limit <= log and hop.fence_epoch <= hop.handle_epoch:
                session.lost_hops.remove(hop)
                self.hops.close(hop)

    # ---- fences and answers

    def on_fence_ack(self, peer: PeerId, answer: FenceAck, now: float) -> None:
        found = self.hops.by_handle.get(answer.handle)
        if found is None or found[1].peer != peer:
            return
        session, hop = found
        is_recorded = self.hops.record_fence_ack(hop, answer)
        if hop not in session.hops and hop not in session.copy_targets:
            self._on_late_ack(session, hop, answer)
        elif not is_recorded or answer.epoch != session.epoch or hop.is_fenced:
            return
        elif answer.unknown:
            self._on_unknown_hop(session, hop, now)
        elif answer.refusal is Refusal.STALE_EPOCH:
            self._on_stale_epoch(session, hop, answer, now)
        elif answer.refusal is not None:
            self._on_refusal(session, hop, answer.refusal, answer, now)
        else:
            self._on_fenced(session, hop, answer, now)

    def _on_fenced(self, session: Session, hop: Hop, answer: FenceAck, now: float) -> None:
        hop.is_fenced = True
        hop.kv, hop.log, hop.retained = answer.kv, answer.log, answer.retained
        hop.counters = answer.counters
        if hop.counters is not None:
            session.newest_run_epoch = max(session.newest_run_epoch, hop.counters.epoch)
        hop.kv_limit = hop.log_limit = NO_TRUNCATION
        self.close_lost_hops(session)
        if session.state is SessionState.FENCING:
            if hop.is_round_trip_timed:
                self._registry.record_round_trip(hop.peer, now - session.fenced_at)
            hop.accepted_turn = session.turn_number
            if session.overdue_epoch is not None and all(h.is_fenced for h in session.hops):
                self._attribute_overdue(session, now)
            else:
                self._start_if_fenced(session, now)

    def _on_late_ack(self, session: Session, hop: Hop, answer: FenceAck) -> None:
        """Take the answer of a hop that was replaced or closed. It may name another owner."""
        if answer.refusal is Refusal.STALE_EPOCH and (session.hops or session.is_in_turn):
            self._relinquish_to_higher(session, answer)
        elif hop in session.lost_hops and hop.handle_epoch < answer.epoch:  # unknown there
            session.lost_hops.remove(hop)
            self.hops.close(hop)
        self.close_lost_hops(session)

    def _on_unknown_hop(self, session: Session, hop: Hop, now: float) -> None:
        hop.forget(session.epoch)
        if session.state is SessionState.FENCING:
            self._ownership_check.require(session, now)  # the hop may have another owner since
            self._ownership_check.awaits_answers(session, now)
            self.send_fences(session, now)

    def send_fences(self, session: Session, now: float) -> None:
        """Send the Fences of this epoch that were not sent yet and may be sent now."""
        for hop in session.hops if session.state is SessionState.FENCING else ():
            may_create = self._ownership_check.may_create(session, hop.peer, now)
            if hop.fence_epoch != session.epoch and (may_create or hop.server_handle != NO_HANDLE):
                self.hop_messages.send_fence(session, hop)

    def _on_refusal(
        self, session: Session, hop: Hop, refusal: Refusal, answer: FenceAck, now: float
    ) -> None:
        """Plan without a server that has no room, in the same epoch; fenced hops stay fenced."""
        if refusal is Refusal.DRAINING:
            self._registry.drain(hop.peer, SHUTDOWN_CAUSE)
        if session.state is not SessionState.FENCING:
            return
        session.excluded.add(hop.peer)
        if refusal is not Refusal.TOO_LONG or session.refusal is not RefusalReason.NO_ROOM:
            session.refusal = REASONS[refusal]  # a longer server has room later
        server = self._registry.find_server(hop.peer)
        if refusal is Refusal.NO_PAGES and not answer.paused:
            session.crowded.add(hop.peer)
        if refusal is Refusal.NO_PAGES and server is not None:
            session.most_room = max(session.most_room or 0, server.room_with(answer.free_pages))
        if hop.server_handle == NO_HANDLE:
            session.hops.remove(hop)
            self.hops.detach(hop)
        self._replan(session, now)

    def _on_stale_epoch(self, session: Session, hop: Hop, answer: FenceAck, now: float) -> None:
        """Two gateways claim the session: the lower rank relinquishes it, the other one retries for a while."""
        hop.forget(session.epoch)
        if self._relinquish_to_higher(session, answer) or hop not in session.hops:
            return
        if session.contested_since is None:
            session.contested_since = now
        if now - session.contested_since >= self._settings.contest_seconds:
            ran_later = session.newest_run_epoch > (answer.owner_last_started or NO_EPOCH)
            self.relinquish(session, keeps_log=ran_later)
        elif session.state is SessionState.FENCING:
            session.refusal = RefusalReason.NO_SERVERS
            self.hold(session, now)

    def _relinquish_to_higher(self, session: Session, answer: FenceAck) -> bool:
        """Relinquish the session if the owner that a server named has a higher rank. Return True if it has."""
        owner = answer.owner_last_started or NO_EPOCH, answer.owner_epoch or session.epoch
        if owner < session.rank:
            return False
        self.relinquish(session, keeps_log=True)
        return True

    def _attribute_overdue(self, session: Session, now: float) -> None:
        """Attribute an overdue token once all hops are fenced, and plan without the faulty servers if possible."""
        faulty = attribute_overdue(session, self._registry, now)
        if not (faulty and self.replan_without(session, faulty, now)):
            self._replan(session, now)

    def replan_without(
        self, session: Session, silent: set[PeerId], now: float, *, is_last: bool = False
    ) -> bool:
        """Plan without `silent` servers, in the same epoch (R5, one loop). Return False if no route avoids them.

        `is_last`: they had all the time there is, so the session does not wait for them even without another route.
        """
        without = self._registry.suspected | silent
        if not is_last and self._planner.plan_route(session, without, now) is None:
            return False
        session.excluded |= silent
        session.refusal = RefusalReason.NO_SERVERS if is_last else session.refusal
        if session.fault_at is None and session.has_run:
            session.fault_at = now
        self._replan(session, now)
        return True

    def _replan(self, session: Session, now: float) -> None:
        if not self._complete_route(session, now):
            return
        session.fenced_at = now
        for hop in session.hops:
            hop.is_round_trip_timed = hop.fence_epoch != session.epoch
            hop.is_fenced = hop.is_fenced and not hop.is_round_trip_timed
        self.send_fences(session, now)
        self._start_if_fenced(session, now)

    # ---- StartEpoch

    def _start_if_fenced(self, session: Session, now: float) -> None:
        if not all(hop.is_fenced for hop in session.hops):
            return
        points = restart_points([HopState(h.kv, h.last, h.retained) for h in session.hops])
        session.credit, session.quiescent_kv = session.target_credit(), session.length - 1
        session.record_start(points[0].start, min(point.start for point in points))
        if session.routed_attempts < self._settings.attempts_without_token:
            session.end_hold(now)
        for index, point in enumerate(points):
            self.hop_messages.start_hop(session, index, point)
        head, tail = session.hops[0], session.hops[-1]
        self.hop_messages.send_log(session, head, min(points[0].start, head.log))
        if tail is not head:
            self.hop_messages.send_log(session, tail, tail.log)
        record_route(session, self._emit)
        session.state, session.has_run, session.fork = SessionState.RUNNING, True, None
        session.excluded.clear()
        session.refusal = RefusalReason.FAULTS
        self._ownership_check.on_start(session)
        self.close_lost_hops(session)

    # ---- no server, no room, no time

    def _no_route(self, session: Session, now: float) -> None:
        """Refuse a turn that has not started; hold one that has."""
        reason = session.refusal if session.excluded else RefusalReason.NO_SERVERS
        if not session.is_recovering and session.held_at is None and not session.hold_tries:
            self._refuse_turn(session, reason)
        else:
            session.refusal = reason
            self.hold(session, now)

    def _refuse_turn(self, session: Session, reason: RefusalReason) -> None:
        """Refuse a turn, all or nothing (R12, admission): a first turn frees its hops, a later one changes nothing.

        Two hops on one server reserve the turn twice. They are freed for lack of pages, and one hop replaces them.
        """
        session.excluded.clear()
        detail = explain_refusal(self._registry, session, reason)
        if session.has_run:
            self._restore_route(session)
            hops = Counter(hop.peer for hop in session.hops)
            is_short = reason is RefusalReason.NO_ROOM and session.crowded  # and in no pause
            most = 1 if is_short else len(session.hops)
            for hop in list(session.hops):
                if hop.server_handle == NO_HANDLE or hops[hop.peer] > most:
                    session.hops.remove(hop)
                    self.hops.detach(hop)
            self.park(session, refused=True)
        else:
            session.state = SessionState.PARKED
            self.close_hops(session)
        self._emit(
            Refused(session.name, reason, detail, retry_after=retry_seconds(session, reason))
        )

    def variant_of_turn(self, session: Session, begun: Session | None) -> ModelVariant | None:
        """Return the variant of the answer that a turn resumes or forks from, or the active one without one."""
        if begun is None or begun.model != session.model:
            return self._registry.active_variant(session.model)
        hops = [(hop.peer, *hop.blocks) for hop in begun.hops] if begun is session else []
        return self._registry.kept_variant(session.model, begun.variant, hops)

    def change_variant(self, session: Session, variant: ModelVariant) -> None:
        """Let a new turn run on another variant: the KV on the servers belongs to the old one. Raise CoreError."""
        check_replaceable(session)
        self.close_hops(session)
        session.variant = variant

    def _restore_route(self, session: Session) -> None:
        """Restore the session as it was before the turn. Hops that the turn created have nothing yet."""
        route = session.restore_before_turn()
        for hop in [hop for hop in session.hops if hop not in route]:
            session.hops.remove(hop)
            self.hops.detach(hop)
        self._set_route(session, route)

    def hold(self, session: Session, now: float) -> None:
        """Hold the session. After a few tries without room it frees all its KV: no recovery waits for another."""
        session.state = SessionState.HELD
        session.excluded.clear()
        if session.held_at is None:
            session.held_at = now
            self._ownership_check.on_link_lost(session, now)
        self._ownership_check.require(session, now + self._settings.lease_seconds / 2, since=now)
        limit = self._hold_limits.limit_seconds(session.model)
        ends = session.held_at + limit - session.held_seconds
        if now >= ends:
            if session.can_undo_turn:
                self._refuse_turn(session, session.refusal)
            else:
                self.fail(session, explain_refusal(self._registry, session, session.refusal))
            return
        pause = self._settings.retry_seconds * 2 ** min(session.hold_tries, 16)
        session.retry_at = min(now + min(pause, self._settings.retry_limit_seconds), ends)
        session.hold_tries += 1
        is_jammed = session.refusal is RefusalReason.NO_ROOM
        if is_jammed and session.hold_tries >= self._settings.release_kv_after:
            self.close_hops(session)

    def fail(self, session: Session, detail: str) -> None:
        """Close a session that cannot be recovered."""
        self._drop(session, SessionLost(session.name, detail))

    def fail_by_report(self, session: Session, peer: PeerId, report: FaultReport) -> None:
        """Close a session whose model gives nothing to sample, or has failed again."""
        has_tokens = report.kind is not FaultKind.NO_TOKEN
        detail = f"the model failed at {peer}: {report.detail}" if has_tokens else report.detail
        repeats = report.kind in (FaultKind.NO_TOKEN, FaultKind.NOT_FINITE)
        self._drop(session, SessionLost(session.name, detail, repeats))

    def relinquish(self, session: Session, *, keeps_log: bool = False) -> None:
        """Close a session that another gateway owns (R20, ownership). A Close only affects hops that are still ours.

        `keeps_log`: the hops are left for a takeover. The other gateway may have ended, or owns an old hop only.
        Otherwise they are freed, or they would outrank what the other gateway runs.
        """
        for hop in session.owned_hops:
            hop.is_relinquished = keeps_log
        self._drop(session, OwnershipLost(session.name))

    def _drop(self, session: Session, reason: Effect) -> None:
        self.close_hops(session)
        session.state = SessionState.PARKED
        self._forget(session)
        self._emit(reason)

    # ---- takeover

    def _variant_of_hops(self, model: str, where: SessionLocation) -> ModelVariant | None:
        """Return the variant that the last epoch ran on if it can go on there, else the active one."""
        hops = [(peer, hop.first, hop.last) for peer, hop in where.hops]
        for peer, *_ in hops:
            server = self._registry.find_server(peer)
            if server is not None and (variant := variants_of(server.hello).get(model)):
                return self._registry.kept_variant(model, variant, hops)
        return self._registry.active_variant(model)

    def take_over(self, session: Session, where: SessionLocation, log: FetchedLog) -> None:
        """Fill a new session with the log and hops that another gateway left, and fence the hops (R20, takeover).

        The hops hold prefixes of what the last epoch ran, and the log is one of them. They change owner by that Fence
        or not at all. All others expire with their lease. If the route uses one again, it is found by its blocks and
        created anew, like every new hop.
        """
        assert log.turn is not None
        session.variant = self._variant_of_hops(session.model, where)
        session.log, session.turn_number = list(log.tokens), 1
        session.turn = replace(log.turn, adapter=session.adapter)
        if session.turn.blocks is not None:  # an older tail logs a token behind the rows
            session.log = [entry for entry in session.log if is_opaque(entry)]
        session.opaque = dict(log.opaque)
        session.has_run, session.newest_run_epoch = True, where.last_started
        servers = self._registry.servers_of(session.model, session.variant)
        compatible = {server.hello.peer for server in servers}
        found = [
            self.hops.create_hop(peer, hop.first, hop.last, kv=hop.kv)
            for peer, hop in where.hops
            if peer in compatible
        ]
        self._set_route(session, longest_chain(found))
        session.numerics = classes_of(session.hops)
        session.raise_epoch()
        for hop in session.hops:  # they may have run on since they were found
            hop.kv_limit, hop.log_limit = session.length - 1, session.length
            self.hop_messages.send_fence(session, hop)
