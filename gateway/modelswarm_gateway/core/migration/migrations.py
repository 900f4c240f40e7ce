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
from modelswarm.protocol.messages import Fenced, Report, Trouble, Window
from modelswarm_gateway.core.interface.effects import Effect, GatewaySettings, Moved
from modelswarm_gateway.core.migration import cutover
from modelswarm_gateway.core.migration.migration import (
    BALANCE,
    Ended,
    Move,
    MovesView,
    Rests,
    behind,
    beside,
    parts,
    repairs,
)
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.recovery.route_planner import places
from modelswarm_gateway.core.routing.path_search import Leg
from modelswarm_gateway.core.routing.server_registry import Fleet
from modelswarm_gateway.core.servers.drain_causes import STOPPING
from modelswarm_gateway.core.sessions.session import Hop, Session, State

PER_TICK = 8  # sessions that are looked at for a place elsewhere, at most
NO_PLACE_SECONDS = 0.5  # a server whose blocks nobody else has is looked at again after this
MOVE_AHEAD = 4  # tokens that the swarm may be ahead of the reader of a session that is to move


class Moves:
    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Fleet,
        recovery: Recovery,
        sessions: Mapping[str, Session],
        emit: Callable[[Effect], None],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._recovery = recovery
        self._sessions = sessions
        self._emit = emit
        self._moves: dict[str, Move] = {}  # by session
        self._rests = Rests()
        self._no_place: dict[PeerId, float] = {}  # until when it is not asked again
        self._leashed: set[str] = set()  # sessions that are to move, or were

    # ---- servers to be left

    def leave(self, peer: PeerId, why: str, now: float) -> None:
        """Its sessions are moved elsewhere, and new ones go there only if nobody else holds a block."""
        self._fleet.leave_alone(peer, why)
        self.tick(now)

    def stay(self, peer: PeerId, why: str, now: float) -> None:
        """Takes back a `leave` of that cause; copies under way come to nothing."""
        self._fleet.use_again(peer, why)
        self.tick(now)

    def leaves(self, peer: PeerId, why: str) -> bool:
        """Whether a `leave` of that cause stands."""
        return self._fleet.is_left(peer, why)

    def view(self, peer: PeerId) -> MovesView | None:
        """How far it is with a server; None: it is not linked."""
        server = self._fleet.get(peer)
        if server is None:
            return None
        return MovesView(
            leaving=peer in self._fleet.left,
            hops=self._fleet.hops[peer],
            others=server.others,
            empty=server.beat is not None and server.beat.sessions == 0,
            moving=sum(move.old.peer == peer for move in self._moves.values()),
            only_there=tuple(self._fleet.only_there(peer)),
        )

    # ---- time

    def tick(self, now: float) -> None:
        for move in list(self._moves.values()):
            self._look_after(move, now)
        self._rest_some(now)
        if self._fleet.left or self._leashed:
            self._leash()
        if any(self._fleet.hops[peer] for peer in self._fleet.left) and not repairs(
            self._sessions.values()
        ):
            self._begin_some(now)
        self._rests.tidy(self._sessions.keys())

    def _leash(self) -> None:
        """A session that is to move has little credit out, so that it comes to rest soon; all others have theirs."""
        left = self._fleet.left
        for session in self._sessions.values():
            leaves = session.name in self._moves or any(hop.peer in left for hop in session.hops)
            if leaves and session.most_ahead is None:
                session.most_ahead = MOVE_AHEAD
                self._leashed.add(session.name)
            elif not leaves and session.name in self._leashed:
                session.most_ahead = None
                self._leashed.discard(session.name)
                self._recovery.orders.credit(session)
        self._leashed &= self._sessions.keys()

    def _look_after(self, move: Move, now: float) -> None:
        if not self._stands(move):
            self._give_up(move, Ended.OVERTAKEN, now)
        elif move.copying and cutover.is_near(move):
            self._approach(move, now)
        elif now - move.since >= self._settings.copy_seconds:
            self._fail(move, now)
        elif cutover.in_vain(move, now):
            self._go_on(move)

    def _stands(self, move: Move) -> bool:
        """Whether the session still runs as it did when the move began, and the old hop is still to be left."""
        session = move.session
        return (
            self._sessions.get(session.name) is session
            and session.epoch == move.epoch
            and session.state is State.RUNNING
            and (move.why == BALANCE or move.old.peer in self._fleet.left)
            and not any(hop.peer in self._fleet.left for hop in move.new)
            and all(self._fleet.linked(hop.peer) for hop in move.new)
            and not any(hop.peer in self._fleet.suspected for hop in move.new)
        )

    def _begin_some(self, now: float) -> None:
        looked_at = 0
        busy = self._busy()
        closed = {move.old.peer for move in self._moves.values() if move.near_at is not None}
        for session in list(self._sessions.values()):
            hop = next((h for h in session.hops if self._may_begin(session, h, busy, now)), None)
            if hop is None or hop.peer in closed:
                continue
            looked_at += 1
            if looked_at > PER_TICK:
                return
            self._begin(session, hop, busy, now)

    def _busy(self) -> Counter[PeerId]:
        """By server, in how many copies it has a part."""
        return Counter(peer for move in self._moves.values() for peer in parts(move))

    def _may_begin(self, session: Session, hop: Hop, busy: Counter[PeerId], now: float) -> bool:
        if hop.peer not in self._fleet.left or session.kind is None:
            return False
        if self._no_place.get(hop.peer, 0.0) > now:
            return False
        if session.state is State.PARKED:
            return True
        if session.state is not State.RUNNING or session.mending or session.name in self._moves:
            return False
        if busy[hop.peer] >= self._settings.copies_per_server:
            return False
        return self._rests.of(session).until <= now

    # ---- one move

    def _begin(self, session: Session, old: Hop, busy: Counter[PeerId], now: float) -> None:
        legs = places(self._fleet, session, old, self._rests.of(session).refused, now)
        parked = session.state is State.PARKED
        if legs is None and not (parked and session.kind != self._fleet.leading(session.model)):
            self._no_place[old.peer] = now + NO_PLACE_SECONDS
            return
        if parked or legs is None:  # no copy: its next turn goes elsewhere (R8)
            session.hops.remove(old)
            self._recovery.hops.leave(old)
            return
        rest = self._rests.of(session)
        warm = rest.failures < self._settings.copy_tries
        move = Move(
            session, session.epoch, self._fleet.why_left(old.peer), old, warm, now, since=now
        )
        self._open(move, legs, busy)

    def _open(self, move: Move, legs: Sequence[Leg], busy: Counter[PeerId]) -> None:
        session, find = move.session, self._recovery.hops.find
        move.new = [find(session, leg.peer, leg.first, leg.last) for leg in legs]
        if any(busy[peer] >= self._settings.copies_per_server for peer in parts(move)):
            return
        busy.update(parts(move))
        self._moves[session.name] = move
        self._rests.of(session).targets.update(hop.peer for hop in move.new)
        for hop in move.new:
            self._recovery.open_beside(session, hop)

    # ---- a session that had better be elsewhere, although its server goes on

    @property
    def idle(self) -> bool:
        return not self._moves and not repairs(self._sessions.values())

    def shift(self, session: Session, old: Hop, to: PeerId, now: float) -> bool:
        """Moves it to an equal server, with a copy or not at all. False: this one cannot go now."""
        rest = self._rests.of(session)
        if session.state is not State.RUNNING or session.mending or session.name in self._moves:
            return False
        if rest.failures:
            return False
        move = Move(session, session.epoch, BALANCE, old, True, now, since=now)
        self._open(move, [Leg(to, *old.blocks)], self._busy())
        return True

    def fenced(self, peer: PeerId, answer: Fenced, now: float) -> None:
        """An answer that the loop has taken note of."""
        move = self._of(answer.handle)
        if move is None or answer.epoch != move.epoch or move.copying or not self._stands(move):
            return
        if answer.unknown or answer.refused is not None:
            self._rests.of(move.session).refused.add(peer)
            self._fail(move, now)
        elif all(hop.answered for hop in move.new):
            for hop in move.new:
                hop.turn = move.session.turn_number
            move.copying, move.since = True, now
            if move.warm:
                self._copy(move)
            else:
                self._switch(move, now)

    def _copy(self, move: Move) -> None:
        """The new hops go, warm, and the old one is told to send them its KV."""
        session, old = move.session, move.old
        for hop in move.new:
            self._recovery.orders.copy(session, old, hop)
            move.kv[hop.reply] = hop.kv
            move.fed[hop.reply] = hop.log
        self._feed(move)

    def _feed(self, move: Move) -> None:
        """Log entries for a new head and a new tail."""
        kind = move.session.kind
        assert kind is not None, "a session that runs has a kind"
        for hop in move.new:
            if hop.first == 0 or hop.last == kind.n_blocks:
                self._recovery.orders.log(move.session, hop, move.fed[hop.reply], warm=True)
                move.fed[hop.reply] = move.session.length

    def token(self, session: Session, now: float) -> None:
        """A new token: perhaps the one that it comes to rest at."""
        move = self._moves.get(session.name)
        if move is not None and move.copying and self._stands(move):
            self._feed(move)
            self._approach(move, now)

    def window(self, peer: PeerId, window: Window, now: float) -> None:
        """A new hop says how far it is."""
        move = self._of(window.handle)
        if move is None or not move.copying or window.epoch != move.epoch:
            return
        if peer != self._recovery.replies[window.handle][1].peer or not self._stands(move):
            return
        move.kv[window.handle] = max(move.kv[window.handle], window.received)
        lag = behind(move)
        if lag < move.lag:
            move.lag, move.since = lag, now
        self._approach(move, now)

    def _approach(self, move: Move, now: float) -> None:
        """Perhaps it is time to go over."""
        if not cutover.is_near(move):
            return
        move.since = now
        if move.near_at is None:
            move.near_at = now
        if cutover.goes(move, now):
            self._switch(move, now)

    def _rest_some(self, now: float) -> None:
        """In a tick, not with a token: those that share steps get theirs one after the other, and are to rest after the
        same one."""
        for wave in cutover.complete(list(self._moves.values()), now):
            self._recovery.orders.rest([move.session for move in wave])
            for move in wave:
                move.rest_at = now
                self._approach(move, now)

    def _go_on(self, move: Move) -> None:
        """The session, for a while."""
        move.rest_at = move.still_at = None
        self._give_credit(move.session)

    def _give_credit(self, session: Session) -> None:
        """Little, until the next look at who is to move."""
        session.most_ahead = MOVE_AHEAD
        self._leashed.add(session.name)
        self._recovery.orders.credit(session)

    def _switch(self, move: Move, now: float) -> None:
        del self._moves[move.session.name]
        self._rests.pop(move.session.name, None)
        self._tell(move, Ended.MOVED if move.warm else Ended.REBUILT, now)
        self._recovery.move(move.session, move.old, move.new, now)

    # ---- what goes wrong

    def concerns(self, peer: PeerId, report: Report, now: float) -> bool:
        """Whether a report is about a copy or says that a server leaves: no session suffers from either."""
        found = self._recovery.replies.get(report.handle)
        if found is None or found[1].peer != peer:
            return False
        session, hop = found
        if report.trouble is Trouble.DRAINING:
            self._fleet.leave_alone(peer, STOPPING)
            return True
        move = self._moves.get(session.name)
        if hop in session.spare:
            if move is not None and report.epoch == move.epoch:
                self._fail(move, now)
            return True
        if report.epoch != session.epoch or not self._about_copy(session, hop, report):
            return False
        if move is not None:
            self._fail(move, now)
        return True

    def _about_copy(self, session: Session, hop: Hop, report: Report) -> bool:
        """The link named leads to where a copy goes, or went in this epoch, and to no neighbour in the route. Where it
        leads to both, a read that failed is the copy's."""
        if report.peer not in self._rests.of(session).targets or hop not in session.hops:
            return False
        move = self._moves.get(session.name)
        copied = move is not None and move.copying and move.old is hop
        return report.peer not in beside(session, hop) or (
            copied and report.trouble is Trouble.FAILED
        )

    def _fail(self, move: Move, now: float) -> None:
        """Tried again, elsewhere or later; after a few times without a copy."""
        self._give_up(move, Ended.DROPPED, now)

    def _give_up(self, move: Move, how: Ended, now: float) -> None:
        self._end(move, how, now)
        rest = self._rests.of(move.session)
        rest.wait(now, self._settings.move_seconds, failed=how is Ended.DROPPED)

    def _end(self, move: Move, how: Ended, now: float) -> None:
        """Takes away what stands beside the session."""
        session = move.session
        del self._moves[session.name]
        if self._sessions.get(session.name) is session:
            self._give_credit(session)
        if move.warm and move.copying and session.epoch == move.epoch:
            self._recovery.orders.end_copies(session, move.old)
        for hop in move.new:
            if hop in session.spare:
                session.spare.remove(hop)
                self._recovery.hops.leave(hop)
        self._tell(move, how, now)

    # ---- helpers

    def _of(self, handle: int) -> Move | None:
        """The move whose new hop has that name."""
        found = self._recovery.replies.get(handle)
        move = None if found is None else self._moves.get(found[0].name)
        if move is None or found is None or found[1] not in move.new:
            return None
        return move

    def _tell(self, move: Move, how: Ended, now: float) -> None:
        seconds = now - move.began
        self._emit(Moved(move.session.name, move.old.peer, move.why, how.value, seconds))
