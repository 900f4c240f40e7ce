"""The one loop R5, for every cause: suspect → Fence all hops (creating new ones) → answers → plan → Go.

Called by `gateway.py` with a session and what happened; it changes the session and appends effects. A held session
(no server for a block, no room) stands inside the loop and enters it again when something changes or its pause ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelswarm.protocol.identity import NO_HANDLE, PeerId
from modelswarm.protocol.messages import FenceAck, Refusal
from modelswarm_gateway.core.interface.effects import Broken, Effect, Outranked, Refused, Rerouted
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import Why
from modelswarm_gateway.core.recovery.fault_attribution import attribute_overdue
from modelswarm_gateway.core.recovery.hold_limit import Holds
from modelswarm_gateway.core.recovery.refusals import detail, meaning
from modelswarm_gateway.core.recovery.route_planner import Plan, Planner
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.drain_causes import SHUTDOWN_CAUSE
from modelswarm_gateway.core.sessions.hop_messages import Orders
from modelswarm_gateway.core.sessions.hop_table import Hops
from modelswarm_gateway.core.sessions.replay_plan import HopState, restart_points
from modelswarm_gateway.core.sessions.session import NO_TRUNCATION, Hop, Session, State


class Recovery:
    """The loop over a registry and its hops; sessions are given with each call."""

    def __init__(
        self,
        settings: GatewaySettings,
        registry: ServerRegistry,
        holds: Holds,
        draw: Callable[[], int],
        emit: Callable[[Effect], None],
        forget: Callable[[Session], None],
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._holds = holds
        self._emit = emit
        self._forget = forget  # drops a broken session from the core's table
        self._planner = Planner(settings, registry)
        self.hops = Hops(registry, draw, emit)
        self.orders = Orders(settings, emit)
        self.replies = self.hops.replies

    # ---- entering the loop

    def fault(self, session: Session, cause: str, peer: PeerId, now: float) -> None:
        """A fault of a turn that runs: note it, then the loop. Parked sessions are repaired when used next (R8)."""
        if not session.in_turn:
            return
        session.trouble = f"{cause} at {peer}"
        if session.fault_at is None:
            session.fault_at = now
        if session.state is not State.HELD:
            self._emit(Rerouted(session.name, cause, peer))
        self.enter(session, now)

    def enter(self, session: Session, now: float) -> None:
        """Freeze the log's length, raise the epoch (R4), and fence every hop of a complete route."""
        session.next_epoch()
        session.credit_cap = None
        session.loops += 1
        session.cut_hops(session.length)
        for hop in [*session.hops, *session.spare]:
            hop.answered, hop.timed = False, True
        if session.loops % self._settings.loops_without_token == 0:
            session.refusal = Why.FAULTS
            self.hold(session, now)
            return
        if self._complete(session, now):
            session.state = State.FENCING
            session.fenced_at = now
            for hop in session.hops:
                self.orders.fence(session, hop)

    def move(self, session: Session, old: Hop, new: list[Hop], now: float) -> None:
        """A planned move (R13): the loop with new hops, open beside the route, in the place of one."""
        at = session.hops.index(old)
        session.hops[at : at + 1] = new
        session.spare = [hop for hop in session.spare if hop not in new]
        session.moved = True
        self.hops.leave(old)
        self.enter(session, now)

    def open_beside(self, session: Session, hop: Hop) -> None:
        """Open a hop that is not on the route, in the session's present epoch, from the room for repairs."""
        self.hops.take(session, hop)
        session.spare.append(hop)
        hop.answered = False
        self.orders.fence(session, hop, repair=True)

    def park(self, session: Session) -> None:
        """Fence without Go (R8): what the log holds now is all that hops may keep."""
        session.next_epoch()
        session.credit_cap = None
        session.state = State.PARKED
        session.cut_hops(session.length)
        for hop in session.hops:
            hop.answered = False
            if self._registry.is_connected(hop.peer) and hop.own != NO_HANDLE:
                self.orders.fence(session, hop, turn=False)

    # ---- the route

    def _complete(self, session: Session, now: float) -> bool:
        """Replace lost hops so that the route covers all blocks; without servers for that: held or refused."""
        plan = self._plan(session, self._registry.suspected, now)
        if plan is None and self._registry.suspected:  # the last resort: they may yet speak
            plan = self._plan(session, frozenset(), now)
        if plan is None:
            self._no_way(session, now)
            return False
        self._replace(session, [self._hop(session, each) for each in plan])
        return True

    def _plan(self, session: Session, without: frozenset[PeerId], now: float) -> Plan | None:
        kind = session.variant
        return None if kind is None else self._planner.plan(session, kind, without, now)

    def _hop(self, session: Session, planned: Hop | RouteHop) -> Hop:
        if isinstance(planned, Hop):
            return planned
        hop = self.hops.find(session, planned.peer, planned.first, planned.last)
        hop.chosen = planned
        return hop

    def _replace(self, session: Session, route: list[Hop]) -> None:
        """What the new route does not use, copies included, is left."""
        kept = {hop.reply for hop in route}
        for hop in [*session.hops, *session.spare]:
            if hop.reply not in kept:
                self.hops.leave(hop)
        for hop in route:
            self.hops.take(session, hop)
        session.hops, session.spare = route, []

    def release(self, session: Session) -> None:
        """Close every hop: pages go back to all servers that can be told."""
        for hop in [*session.hops, *session.spare]:
            self.hops.leave(hop)
        session.hops, session.spare = [], []

    # ---- fences and answers

    def fenced(self, peer: PeerId, answer: FenceAck, now: float) -> None:
        found = self.replies.get(answer.handle)
        if found is None or found[1].peer != peer:
            return
        session, hop = found
        left = hop.reply in self.hops.leaving
        if not self.hops.answered(hop, answer):
            if left and session.hops and answer.refusal is Refusal.STALE_EPOCH:
                self.let_go(session)  # it had gone on elsewhere, and its owner lives
            return
        if answer.epoch != session.epoch or hop.answered:
            return
        if answer.unknown:
            self._unknown(session, hop, now)
        elif answer.refusal is Refusal.STALE_EPOCH:
            self._outranked(session, hop, answer, now)
        elif answer.refusal is not None:
            self._refused(session, hop, answer.refusal, now)
        else:
            hop.answered = True
            hop.kv, hop.log, hop.kept = answer.kv, answer.log, answer.retained
            hop.counters = answer.counters
            hop.kv_limit = hop.log_limit = NO_TRUNCATION
            if session.state is State.FENCING:
                if hop.timed:
                    self._registry.record_round_trip(peer, now - session.fenced_at)
                hop.turn = session.turn_number
                if session.overdue is not None and all(h.answered for h in session.hops):
                    self._blame(session, now)
                else:
                    self._maybe_go(session)

    def _unknown(self, session: Session, hop: Hop, now: float) -> None:
        hop.forget(session.epoch)
        if session.state is State.FENCING:
            self.orders.fence(session, hop)

    def _refused(self, session: Session, hop: Hop, refusal: Refusal, now: float) -> None:
        """Plan around a server that has no room, in the same epoch; the hops that answered keep their answers."""
        if refusal is Refusal.DRAINING:
            self._registry.drain(hop.peer, SHUTDOWN_CAUSE)
        if session.state is not State.FENCING:
            return
        session.shunned.add(hop.peer)
        session.refusal = meaning(refusal)
        if hop.own == NO_HANDLE:
            session.hops.remove(hop)
            self.hops.never_was(hop)
        self._replan(session, now)

    def _outranked(self, session: Session, hop: Hop, answer: FenceAck, now: float) -> None:
        """Two gateways want it, and each may have some of its hops. If both let go, nothing is left of it: so only the
        one with the lower epoch does, or with no hop at all. The other one asks again for a while."""
        hop.forget(session.epoch)
        if session.contended is None:
            session.contended = now
        lower = answer.owner_epoch is None or answer.owner_epoch > session.epoch
        alone = all(each.own == NO_HANDLE for each in session.hops)
        if lower or alone or now - session.contended >= self._settings.contend_seconds:
            self.let_go(session)
        elif session.state is State.FENCING:
            session.refusal = Why.NO_SERVERS
            self.hold(session, now)

    def _blame(self, session: Session, now: float) -> None:
        """All have answered after a deadline: the plan may be another, now that it is known who is at fault."""
        idle = attribute_overdue(session, self._registry, now)
        if not (idle and self.go_around(session, idle, now)):
            self._replan(session, now)

    def go_around(self, session: Session, silent: set[PeerId], now: float) -> bool:
        """Plan without hops that do not answer, in the same epoch (R5); False if there is no way without them."""
        without = self._registry.suspected | silent
        if self._plan(session, without, now) is None:
            return False
        session.shunned |= silent
        if session.fault_at is None and session.admitted:
            session.fault_at = now
        self._replan(session, now)
        return True

    def _replan(self, session: Session, now: float) -> None:
        before = {h.reply for h in session.hops}
        if not self._complete(session, now):
            return
        session.fenced_at = now
        for new in session.hops:
            new.timed = new.reply not in before
            if new.timed:
                new.answered = False
                self.orders.fence(session, new)
        self._maybe_go(session)

    # ---- Go

    def _maybe_go(self, session: Session) -> None:
        if not all(hop.answered for hop in session.hops):
            return
        points = restart_points([HopState(h.kv, h.last, h.kept) for h in session.hops])
        session.credit = session.wanted_credit()
        session.goes_from(points[0].start, min(point.start for point in points))
        session.reading = session.length - min(point.start for point in points)
        for index, point in enumerate(points):
            self.orders.go(session, index, point)
        head, tail = session.hops[0], session.hops[-1]
        self.orders.log(session, head, min(points[0].start, head.log))
        if tail is not head:
            self.orders.log(session, tail, tail.log)
        session.state, session.ran = State.RUNNING, session.epoch
        session.admitted = True
        session.shunned.clear()
        session.refusal = Why.FAULTS

    # ---- no server, no room, no time

    def _no_way(self, session: Session, now: float) -> None:
        """A turn that has not begun is refused; a session that has, waits."""
        why = session.refusal if session.shunned else Why.NO_SERVERS
        if not session.mending and session.held_at is None and not session.tries:
            self._refuse(session, why)
        else:
            session.refusal = why
            self.hold(session, now)

    def _refuse(self, session: Session, why: Why) -> None:
        """All-or-nothing (R12): grants of a first turn are given back, those of later turns keep their KV."""
        session.shunned.clear()
        if session.admitted:
            self.park(session)
        else:
            session.state = State.PARKED
            self.release(session)
        self._emit(
            Refused(session.name, why, detail(self._registry, session, why), retry_after=1.0)
        )

    def hold(self, session: Session, now: float) -> None:
        """Wait inside the loop; after a few tries without KV anywhere, so that repairs never wait on each other."""
        session.state = State.HELD
        session.shunned.clear()
        if session.held_at is None:
            session.held_at = now
        ends = session.held_at + self._holds.seconds(session.model)
        if now >= ends:
            self.give_up(session, detail(self._registry, session, session.refusal))
            return
        pause = self._settings.retry_seconds * 2 ** min(session.tries, 16)
        session.retry_at = min(now + min(pause, self._settings.retry_limit_seconds), ends)
        session.tries += 1
        kv_is_no_help = session.refusal in (Why.NO_ROOM, Why.FAULTS)
        if kv_is_no_help and session.tries >= self._settings.give_up_kv_after:
            self.release(session)

    def give_up(self, session: Session, detail: str) -> None:
        self.release(session)
        session.state = State.PARKED
        self._forget(session)
        self._emit(Broken(session.name, detail))

    def let_go(self, session: Session) -> None:
        """Another gateway has it (R20). A Close reaches only the hops that are still this one's."""
        self.release(session)
        session.state = State.PARKED
        self._forget(session)
        self._emit(Outranked(session.name))

    def adopt(self, session: Session, hops: Sequence[Hop]) -> None:
        """Take over what another gateway left, up to the log as it was found: fenced, without Go (R8)."""
        self._replace(session, list(hops))
        session.next_epoch()
        session.cut_hops(session.length)
        for hop in hops:
            self.orders.fence(session, hop)

    def silent(self, session: Session, now: float) -> None:
        """Some hops have not answered their Fence in time: plan without them."""
        for hop in session.hops:
            if not hop.answered:
                session.shunned.add(hop.peer)
        session.refusal = Why.NO_SERVERS
        if session.fault_at is None and session.admitted:
            session.fault_at = now
        self.enter(session, now)
