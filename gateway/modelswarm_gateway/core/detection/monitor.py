"""Who is at fault when nobody says so: silent servers, hops that do not answer a Fence, our own lateness (R19, R21).

The core tells it what was heard and lets it look around at every tick; it puts sessions into the loop. What a server
says of itself, links that break and gaps are not its business: those are faults that somebody reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.detection.failure_detector import Suspicion
from modelswarm_gateway.core.detection.outlier_detector import Slowness
from modelswarm_gateway.core.detection.probes import Trials
from modelswarm_gateway.core.detection.stall_clock import AwakeClock
from modelswarm_gateway.core.detection.token_deadlines import Progress, expected, owed, patience
from modelswarm_gateway.core.interface.effects import GatewaySettings
from modelswarm_gateway.core.migration.migrations import Moves
from modelswarm_gateway.core.recovery.hold_limit import Holds
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.routing.server_registry import SLOW, Fleet
from modelswarm_gateway.core.sessions.session import Hop, Session, State
from modelswarm_gateway.core.takeover.ownership_check import Absence

COMPARE_SECONDS = 1.0
ALIVE_SECONDS = 2.0  # a server that says other things may take so long over a Fence


class Detection:
    def __init__(
        self,
        settings: GatewaySettings,
        peer: PeerId,
        fleet: Fleet,
        holds: Holds,
        recovery: Recovery,
        moves: Moves,
        absence: Absence,
    ) -> None:
        """`peer` is this gateway."""
        self._settings = settings
        self._peer = peer
        self._fleet = fleet
        self._holds = holds
        self._recovery = recovery
        self._moves = moves
        self._absence = absence
        self._clock = AwakeClock()
        self._suspicion = Suspicion(settings.silent_seconds)
        self._progress: dict[str, Progress] = {}
        self._slowness = Slowness(fleet)
        self._trials = Trials(fleet, moves)
        self._compared_at = 0.0
        self._slow: set[PeerId] = set()  # servers whose sessions are moved away
        self.live: set[PeerId] = set()  # servers that carry routes which run

    def joined(self, peer: PeerId, beat_seconds: float, now: float) -> None:
        self._suspicion.join(peer, self._clock.read(now), beat_seconds)
        self._slowness.joined(peer)

    def left(self, peer: PeerId, now: float) -> None:
        self._suspicion.leave(peer)
        self._slowness.left(peer)
        self._trials.left(peer)
        self._take_back({peer} & self._slow, now)
        self._fleet.suspect(self._suspicion.suspected)

    def heard(self, peer: PeerId, now: float) -> None:
        """Anything is a sign of life."""
        if self._suspicion.heard(peer, self._clock.read(now)):
            self._fleet.suspect(self._suspicion.suspected)

    def look(self, sessions: Collection[Session], now: float) -> None:
        """At every tick."""
        stood_still = self._clock.tick(now)
        for session in sessions if stood_still else ():
            session.fenced_at = min(now, session.fenced_at + stood_still)
            if session.held_at is not None:
                session.held_at = min(now, session.held_at + stood_still)
        self.live = {hop.peer for s in sessions if s.state is State.RUNNING for hop in s.hops}
        self._fleet.rests(self._resting(sessions))
        time = self._clock.read(now)
        self._suspicion.expect(self.live, time)
        for peer in self._suspicion.find(time):
            self._suspect(peer, sessions, now)
        for session in sessions:
            if session.state is State.FENCING:
                self._look_at_answers(session, now)
        self._look_at_progress([s for s in sessions if owed(s)], now)
        self._slowness.read_some(now)
        if now - self._compared_at >= COMPARE_SECONDS:
            self._compared_at = now
            self._compare(sessions, now)
            self._give_up(time)

    def _resting(self, sessions: Collection[Session]) -> Counter[PeerId]:
        """By server on trial, the hops of sessions that owe no token: turns that are over, readers that are behind."""
        trial = self._fleet.on_trial
        return Counter(
            hop.peer
            for session in (sessions if trial else ())
            if session.state is not State.FENCING and not owed(session)
            for hop in session.hops
            if hop.peer in trial
        )

    def wake(self, sessions: Collection[Session], now: float) -> None:
        """Before anything else is done: after a sleep of half a lease, leases may have ended, and others may have taken
        sessions for theirs; nothing goes on without a Fence (R19)."""
        if self._clock.late(now) <= self._settings.lease_seconds / 2:
            return
        slept = self._clock.tick(now)
        for session in sessions:
            self._absence.over(session)
            if session.held_at is not None:
                session.held_at += slept  # servers may come back in a moment
            if session.state is not State.HELD:
                self._recovery.fault(session, "late", self._peer, now)

    def _suspect(self, peer: PeerId, sessions: Collection[Session], now: float) -> None:
        """Every session on it looks for another route, those that wait for its answers too."""
        self._fleet.suspect(self._suspicion.suspected)
        self._fleet.blame(peer, "silent", now)
        for session in sessions:
            if session.state is not State.HELD and any(hop.peer == peer for hop in session.hops):
                self._recovery.fault(session, "silent", peer, now)

    def _compare(self, sessions: Collection[Session], now: float) -> None:
        """Slow servers are left for a while, and then have to show that they are no longer slow."""
        over = {peer for peer in self._slow if self._fleet.ejection_over(peer, now)}
        self._take_back(over, now)
        for peer in self._slowness.find(now):
            self._fleet.blame(peer, SLOW, now)
            self._slow.add(peer)
            self._moves.leave(peer, SLOW, now)
        for peer in self._slowness.doubtful:
            if equal := self._trials.begin(peer, sessions, now):
                self._slowness.tried(peer, equal)

    def _give_up(self, time: float) -> None:
        """Coverage counts who is linked; a link that nobody speaks on is none."""
        for peer, silence in self._suspicion.unheard(time):
            if silence >= self._settings.dead_seconds:
                self._fleet.give_up(peer, f"it has said nothing for {silence:.0f} s")

    def _take_back(self, peers: Collection[PeerId], now: float) -> None:
        self._slow.difference_update(peers)
        for peer in peers:
            self._moves.stay(peer, SLOW, now)

    # ---- answers to a Fence

    def _look_at_answers(self, session: Session, now: float) -> None:
        waited = now - session.fenced_at
        if waited >= self._holds.fence_seconds(session.model):
            self._recovery.silent(session, now)
            return
        missing = {
            h.peer for h in session.hops if not h.answered and self._overdue(h, session, now)
        }
        if missing and self._recovery.go_around(session, missing, now):
            for peer in missing:
                self._fleet.blame(peer, "silent", now)

    def _overdue(self, hop: Hop, session: Session, now: float) -> bool:
        """Whether an answer should have come. Who says other things meanwhile has a step to finish first."""
        patience = self._settings.answer_seconds + self._fleet.pace(hop.peer).step
        asked = self._clock.read(now) - (now - session.fenced_at)
        if self._suspicion.said_since(hop.peer, asked) and not self._fleet.pace(hop.peer).stuck:
            patience = max(patience, ALIVE_SECONDS)
        return now - session.fenced_at >= patience

    # ---- tokens

    def _look_at_progress(self, sessions: Collection[Session], now: float) -> None:
        """Which of these have waited too long for the token that the swarm owes them."""
        time = self._clock.read(now)
        before, self._progress = self._progress, {}
        reading: Counter[PeerId] = Counter()
        for session in sessions:
            progress = before.get(session.name) or Progress(session.epoch, session.length, time)
            progress.see(session, time)
            self._progress[session.name] = progress
            if session.reading:
                reading.update({hop.peer: session.reading for hop in session.hops})
        for session in sessions:
            waited = time - self._progress[session.name].since
            if waited < self._settings.overdue_seconds:
                continue
            if waited >= patience(self._expected(session, reading, now), session.overdues):
                session.overdue = session.epoch
                session.overdues += 1
                self._recovery.fault(session, "overdue", session.hops[-1].peer, now)

    def _expected(self, session: Session, reading: Counter[PeerId], now: float) -> float:
        gap = self._progress[session.name].gap
        rows = max(reading[hop.peer] for hop in session.hops)
        paces = [self._fleet.pace(hop.peer) for hop in session.hops]
        return expected(self._settings.overdue_seconds, gap, paces, rows, now)
