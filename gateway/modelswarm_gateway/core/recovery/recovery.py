"""The one loop R5, for every cause: suspect → Fence all hops (creating new ones) → answers → plan → Go.

Called by `gateway.py` with a session and what happened; it changes the session and appends effects. A held session
(no server for a block, no room) stands inside the loop and enters it again when something changes or its pause ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelswarm.protocol.identity import NO_HANDLE, PeerId
from modelswarm.protocol.messages import FenceAck, Refusal
from modelswarm_gateway.core.interface.effects import (
    Effect,
    OwnershipLost,
    Refused,
    Rerouted,
    SessionLost,
)
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import RefusalReason
from modelswarm_gateway.core.recovery.fault_attribution import attribute_overdue
from modelswarm_gateway.core.recovery.hold_limit import HoldLimits
from modelswarm_gateway.core.recovery.refusals import explain_refusal, reason_for
from modelswarm_gateway.core.recovery.route_planner import Plan, RoutePlanner
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.drain_causes import SHUTDOWN_CAUSE
from modelswarm_gateway.core.sessions.hop_messages import HopMessages
from modelswarm_gateway.core.sessions.hop_table import HopTable
from modelswarm_gateway.core.sessions.replay_plan import HopState, restart_points
from modelswarm_gateway.core.sessions.session import NO_TRUNCATION, Hop, Session, SessionState


class Recovery:
    """The loop over a registry and its hops; sessions are given with each call."""

    def __init__(
        self,
        settings: GatewaySettings,
        registry: ServerRegistry,
        hold_limits: HoldLimits,
        draw: Callable[[], int],
        emit: Callable[[Effect], None],
        forget: Callable[[Session], None],
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._hold_limits = hold_limits
        self._emit = emit
        self._forget = forget  # drops a broken session from the core's table
        self._planner = RoutePlanner(settings, registry)
        self.hops = HopTable(registry, draw, emit)
        self.hop_messages = HopMessages(settings, emit)
        self.hops_by_handle = self.hops.by_handle

    # ---- entering the loop

    def on_fault(self, session: Session, cause: str, peer: PeerId, now: float) -> None:
        """A fault of a turn that runs: note it, then the loop. Parked sessions are repaired when used next (R8)."""
        if not session.is_in_turn:
            return
        session.last_fault = f"{cause} at {peer}"
        if session.fault_at is None:
            session.fault_at = now
        if session.state is not SessionState.HELD:
            self._emit(Rerouted(session.name, cause, peer))
        self.enter_loop(session, now)

    def enter_loop(self, session: Session, now: float) -> None:
        """Freeze the log's length, raise the epoch (R4), and fence every hop of a complete route."""
        session.raise_epoch()
        session.credit_cap = None
        session.attempts += 1
        session.truncate_hops(session.length)
        for hop in [*session.hops, *session.copy_targets]:
            hop.is_fenced, hop.is_round_trip_timed = False, True
        if session.attempts % self._settings.attempts_without_token == 0:
            session.refusal = RefusalReason.FAULTS
            self.hold(session, now)
            return
        if self._complete_route(session, now):
            session.state = SessionState.FENCING
            session.fenced_at = now
            for hop in session.hops:
                self.hop_messages.send_fence(session, hop)

    def cut_over(self, session: Session, old: Hop, new: list[Hop], now: float) -> None:
        """A planned move (R13): the loop with new hops, open beside the route, in the place of one."""
        at = session.hops.index(old)
        session.hops[at : at + 1] = new
        session.copy_targets = [hop for hop in session.copy_targets if hop not in new]
        session.has_migrated = True
        self.hops.detach(old)
        self.enter_loop(session, now)

    def open_copy_target(self, session: Session, hop: Hop) -> None:
        """Open a hop that is not on the route, in the session's present epoch, from the room for repairs."""
        self.hops.attach(session, hop)
        session.copy_targets.append(hop)
        hop.is_fenced = False
        self.hop_messages.send_fence(session, hop, for_recovery=True)

    def park(self, session: Session) -> None:
        """Fence without Go (R8): what the log holds now is all that hops may keep."""
        session.raise_epoch()
        session.credit_cap = None
        session.state = SessionState.PARKED
        session.truncate_hops(session.length)
        for hop in session.hops:
            hop.is_fenced = False
            if self._registry.is_connected(hop.peer) and hop.server_handle != NO_HANDLE:
                self.hop_messages.send_fence(session, hop, with_turn=False)

    # ---- the route

    def _complete_route(self, session: Session, now: float) -> bool:
        """Replace lost hops so that the route covers all blocks; without servers for that: held or refused."""
        plan = self._plan_route(session, self._registry.suspected, now)
        if plan is None and self._registry.suspected:  # the last resort: they may yet speak
            plan = self._plan_route(session, frozenset(), now)
        if plan is None:
            self._no_route(session, now)
            return False
        self._set_route(session, [self._hop_for(session, each) for each in plan])
        return True

    def _plan_route(self, session: Session, without: frozenset[PeerId], now: float) -> Plan | None:
        variant = session.variant
        return None if variant is None else self._planner.plan_route(session, variant, without, now)

    def _hop_for(self, session: Session, planned: Hop | RouteHop) -> Hop:
        if isinstance(planned, Hop):
            return planned
        hop = self.hops.find_or_create(session, planned.peer, planned.first, planned.last)
        hop.route_hop = planned
        return hop

    def _set_route(self, session: Session, route: list[Hop]) -> None:
        """What the new route does not use, copies included, is left."""
        kept = {hop.gateway_handle for hop in route}
        for hop in [*session.hops, *session.copy_targets]:
            if hop.gateway_handle not in kept:
                self.hops.detach(hop)
        for hop in route:
            self.hops.attach(session, hop)
        session.hops, session.copy_targets = route, []

    def close_hops(self, session: Session) -> None:
        """Close every hop: pages go back to all servers that can be told."""
        for hop in [*session.hops, *session.copy_targets]:
            self.hops.detach(hop)
        session.hops, session.copy_targets = [], []

    # ---- fences and answers

    def on_fence_ack(self, peer: PeerId, answer: FenceAck, now: float) -> None:
        found = self.hops_by_handle.get(answer.handle)
        if found is None or found[1].peer != peer:
            return
        session, hop = found
        left = hop.gateway_handle in self.hops.closing
        if not self.hops.record_fence_ack(hop, answer):
            if left and session.hops and answer.refusal is Refusal.STALE_EPOCH:
                self.relinquish(session)  # it had gone on elsewhere, and its owner lives
            return
        if answer.epoch != session.epoch or hop.is_fenced:
            return
        if answer.unknown:
            self._on_unknown_hop(session, hop, now)
        elif answer.refusal is Refusal.STALE_EPOCH:
            self._on_stale_epoch(session, hop, answer, now)
        elif answer.refusal is not None:
            self._on_refusal(session, hop, answer.refusal, now)
        else:
            hop.is_fenced = True
            hop.kv, hop.log, hop.retained = answer.kv, answer.log, answer.retained
            hop.counters = answer.counters
            hop.kv_limit = hop.log_limit = NO_TRUNCATION
            if session.state is SessionState.FENCING:
                if hop.is_round_trip_timed:
                    self._registry.record_round_trip(peer, now - session.fenced_at)
                hop.accepted_turn = session.turn_number
                if session.overdue_epoch is not None and all(h.is_fenced for h in session.hops):
                    self._attribute_overdue(session, now)
                else:
                    self._start_if_fenced(session)

    def _on_unknown_hop(self, session: Session, hop: Hop, now: float) -> None:
        hop.forget(session.epoch)
        if session.state is SessionState.FENCING:
            self.hop_messages.send_fence(session, hop)

    def _on_refusal(self, session: Session, hop: Hop, refusal: Refusal, now: float) -> None:
        """Plan around a server that has no room, in the same epoch; the hops that answered keep their answers."""
        if refusal is Refusal.DRAINING:
            self._registry.drain(hop.peer, SHUTDOWN_CAUSE)
        if session.state is not SessionState.FENCING:
            return
        session.excluded.add(hop.peer)
        session.refusal = reason_for(refusal)
        if hop.server_handle == NO_HANDLE:
            session.hops.remove(hop)
            self.hops.discard(hop)
        self._replan(session, now)

    def _on_stale_epoch(self, session: Session, hop: Hop, answer: FenceAck, now: float) -> None:
        """Two gateways want it, and each may have some of its hops. If both let go, nothing is left of it: so only the
        one with the lower epoch does, or with no hop at all. The other one asks again for a while."""
        hop.forget(session.epoch)
        if session.contested_since is None:
            session.contested_since = now
        lower = answer.owner_epoch is None or answer.owner_epoch > session.epoch
        alone = all(each.server_handle == NO_HANDLE for each in session.hops)
        if lower or alone or now - session.contested_since >= self._settings.contest_seconds:
            self.relinquish(session)
        elif session.state is SessionState.FENCING:
            session.refusal = RefusalReason.NO_SERVERS
            self.hold(session, now)

    def _attribute_overdue(self, session: Session, now: float) -> None:
        """All have answered after a deadline: the plan may be another, now that it is known who is at fault."""
        idle = attribute_overdue(session, self._registry, now)
        if not (idle and self.replan_without(session, idle, now)):
            self._replan(session, now)

    def replan_without(self, session: Session, silent: set[PeerId], now: float) -> bool:
        """Plan without hops that do not answer, in the same epoch (R5); False if there is no way without them."""
        without = self._registry.suspected | silent
        if self._plan_route(session, without, now) is None:
            return False
        session.excluded |= silent
        if session.fault_at is None and session.has_run:
            session.fault_at = now
        self._replan(session, now)
        return True

    def _replan(self, session: Session, now: float) -> None:
        before = {h.gateway_handle for h in session.hops}
        if not self._complete_route(session, now):
            return
        session.fenced_at = now
        for new in session.hops:
            new.is_round_trip_timed = new.gateway_handle not in before
            if new.is_round_trip_timed:
                new.is_fenced = False
                self.hop_messages.send_fence(session, new)
        self._start_if_fenced(session)

    # ---- Go

    def _start_if_fenced(self, session: Session) -> None:
        if not all(hop.is_fenced for hop in session.hops):
            return
        points = restart_points([HopState(h.kv, h.last, h.retained) for h in session.hops])
        session.credit = session.target_credit()
        session.record_start(points[0].start, min(point.start for point in points))
        session.pending_prefill_rows = session.length - min(point.start for point in points)
        for index, point in enumerate(points):
            self.hop_messages.start_hop(session, index, point)
        head, tail = session.hops[0], session.hops[-1]
        self.hop_messages.send_log(session, head, min(points[0].start, head.log))
        if tail is not head:
            self.hop_messages.send_log(session, tail, tail.log)
        session.state, session.last_started = SessionState.RUNNING, session.epoch
        session.has_run = True
        session.excluded.clear()
        session.refusal = RefusalReason.FAULTS

    # ---- no server, no room, no time

    def _no_route(self, session: Session, now: float) -> None:
        """A turn that has not begun is refused; a session that has, waits."""
        reason = session.refusal if session.excluded else RefusalReason.NO_SERVERS
        if not session.is_recovering and session.held_at is None and not session.hold_tries:
            self._refuse_turn(session, reason)
        else:
            session.refusal = reason
            self.hold(session, now)

    def _refuse_turn(self, session: Session, reason: RefusalReason) -> None:
        """All-or-nothing (R12): grants of a first turn are given back, those of later turns keep their KV."""
        session.excluded.clear()
        if session.has_run:
            self.park(session)
        else:
            session.state = SessionState.PARKED
            self.close_hops(session)
        self._emit(
            Refused(
                session.name,
                reason,
                explain_refusal(self._registry, session, reason),
                retry_after=1.0,
            )
        )

    def hold(self, session: Session, now: float) -> None:
        """Wait inside the loop; after a few tries without KV anywhere, so that repairs never wait on each other."""
        session.state = SessionState.HELD
        session.excluded.clear()
        if session.held_at is None:
            session.held_at = now
        ends = session.held_at + self._hold_limits.limit_seconds(session.model)
        if now >= ends:
            self.fail(session, explain_refusal(self._registry, session, session.refusal))
            return
        pause = self._settings.retry_seconds * 2 ** min(session.hold_tries, 16)
        session.retry_at = min(now + min(pause, self._settings.retry_limit_seconds), ends)
        session.hold_tries += 1
        kv_is_no_help = session.refusal in (RefusalReason.NO_ROOM, RefusalReason.FAULTS)
        if kv_is_no_help and session.hold_tries >= self._settings.release_kv_after:
            self.close_hops(session)

    def fail(self, session: Session, detail: str) -> None:
        self.close_hops(session)
        session.state = SessionState.PARKED
        self._forget(session)
        self._emit(SessionLost(session.name, detail))

    def relinquish(self, session: Session) -> None:
        """Another gateway has it (R20). A Close reaches only the hops that are still this one's."""
        self.close_hops(session)
        session.state = SessionState.PARKED
        self._forget(session)
        self._emit(OwnershipLost(session.name))

    def adopt_hops(self, session: Session, hops: Sequence[Hop]) -> None:
        """Take over what another gateway left, up to the log as it was found: fenced, without Go (R8)."""
        self._set_route(session, list(hops))
        session.raise_epoch()
        session.truncate_hops(session.length)
        for hop in hops:
            self.hop_messages.send_fence(session, hop)

    def on_fence_timeout(self, session: Session, now: float) -> None:
        """Some hops have not answered their Fence in time: plan without them."""
        for hop in session.hops:
            if not hop.is_fenced:
                session.excluded.add(hop.peer)
        session.refusal = RefusalReason.NO_SERVERS
        if session.fault_at is None and session.has_run:
            session.fault_at = now
        self.enter_loop(session, now)
