"""Who is at fault when nobody says so: silent servers, hops that do not answer a Fence, our own lateness (R19, R21).

The core tells it what was heard and lets it look around at every tick; it puts sessions into the loop. What a server
says of itself, links that break and gaps are not its business: those are faults that somebody reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.detection.failure_detector import FailureDetector
from modelswarm_gateway.core.detection.outlier_detector import OutlierDetector
from modelswarm_gateway.core.detection.probes import Probes
from modelswarm_gateway.core.detection.stall_clock import StallClock
from modelswarm_gateway.core.detection.token_deadlines import Progress, expected_seconds, is_token_due, token_timeout
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.migration.migrations import Migrations
from modelswarm_gateway.core.recovery.hold_limit import Holds
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.routing.server_registry import SLOW_CAUSE, ServerRegistry
from modelswarm_gateway.core.sessions.session import Hop, Session, State
from modelswarm_gateway.core.takeover.ownership_check import Absence

COMPARE_INTERVAL = 1.0
ALIVE_ACK_SECONDS = 2.0  # a server that says other things may take so long over a Fence


class HealthMonitor:
    def __init__(
        self,
        settings: GatewaySettings,
        peer: PeerId,
        registry: ServerRegistry,
        holds: Holds,
        recovery: Recovery,
        migrations: Migrations,
        absence: Absence,
    ) -> None:
        """`peer` is this gateway."""
        self._settings = settings
        self._peer = peer
        self._registry = registry
        self._holds = holds
        self._recovery = recovery
        self._migrations = migrations
        self._absence = absence
        self._clock = StallClock()
        self._failure_detector = FailureDetector(settings.silent_seconds)
        self._progress: dict[str, Progress] = {}
        self._outlier_detector = OutlierDetector(registry)
        self._probes = Probes(registry, migrations)
        self._compared_at = 0.0
        self._slow: set[PeerId] = set()  # servers whose sessions are moved away
        self.serving: set[PeerId] = set()  # servers that carry routes which run

    def on_peer_connected(self, peer: PeerId, heartbeat_seconds: float, now: float) -> None:
        self._failure_detector.add_peer(peer, self._clock.elapsed(now), heartbeat_seconds)
        self._outlier_detector.add_server(peer)

    def on_peer_lost(self, peer: PeerId, now: float) -> None:
        self._failure_detector.remove_peer(peer)
        self._outlier_detector.remove_server(peer)
        self._probes.remove_server(peer)
        self._undrain({peer} & self._slow, now)
        self._registry.set_suspected(self._failure_detector.suspected)

    def on_message(self, peer: PeerId, now: float) -> None:
        """Anything is a sign of life."""
        if self._failure_detector.on_message(peer, self._clock.elapsed(now)):
            self._registry.set_suspected(self._failure_detector.suspected)

    def tick(self, sessions: Collection[Session], now: float) -> None:
        """At every tick."""
        stood_still = self._clock.advance(now)
        for session in sessions if stood_still else ():
            session.fenced_at = min(now, session.fenced_at + stood_still)
            if session.held_at is not None:
                session.held_at = min(now, session.held_at + stood_still)
        self.serving = {hop.peer for s in sessions if s.state is State.RUNNING for hop in s.hops}
        self._registry.set_idle_hops(self._idle_canary_hops(sessions))
        time = self._clock.elapsed(now)
        self._failure_detector.set_monitored(self.serving, time)
        for peer in self._failure_detector.detect(time):
            self._suspect(peer, sessions, now)
        for session in sessions:
            if session.state is State.FENCING:
                self._check_fence_acks(session, now)
        self._check_tokens([s for s in sessions if is_token_due(s)], now)
        self._outlier_detector.read_backlog(now)
        if now - self._compared_at >= COMPARE_INTERVAL:
            self._compared_at = now
            self._detect_outliers(sessions, now)
            self._disconnect_silent(time)

    def _idle_canary_hops(self, sessions: Collection[Session]) -> Counter[PeerId]:
        """By server on trial, the hops of sessions that owe no token: turns that are over, readers that are behind."""
        trial = self._registry.health.on_canary
        return Counter(
            hop.peer
            for session in (sessions if trial else ())
            if session.state is not State.FENCING and not is_token_due(session)
            for hop in session.hops
            if hop.peer in trial
        )

    def after_stall(self, sessions: Collection[Session], now: float) -> None:
        """Before anything else is done: after a sleep of half a lease, leases may have ended, and others may have taken
        sessions for theirs; nothing goes on without a Fence (R19)."""
        if self._clock.tick_delay(now) <= self._settings.lease_seconds / 2:
            return
        slept = self._clock.advance(now)
        for session in sessions:
            self._absence.over(session)
            if session.held_at is not None:
                session.held_at += slept  # servers may come back in a moment
            if session.state is not State.HELD:
                self._recovery.fault(session, "late", self._peer, now)

    def _suspect(self, peer: PeerId, sessions: Collection[Session], now: float) -> None:
        """Every session on it looks for another route, those that wait for its answers too."""
        self._registry.set_suspected(self._failure_detector.suspected)
        self._registry.eject(peer, "silent", now)
        for session in sessions:
            if session.state is not State.HELD and any(hop.peer == peer for hop in session.hops):
                self._recovery.fault(session, "silent", peer, now)

    def _detect_outliers(self, sessions: Collection[Session], now: float) -> None:
        """Slow servers are left for a while, and then have to show that they are no longer slow."""
        over = {peer for peer in self._slow if now >= self._registry.health.ejected_until(peer)}
        self._undrain(over, now)
        for peer in self._outlier_detector.detect(now):
            self._registry.eject(peer, SLOW_CAUSE, now)
            self._slow.add(peer)
            self._migrations.drain(peer, SLOW_CAUSE, now)
        for peer in self._outlier_detector.undecided:
            if equal := self._probes.start_probe(peer, sessions, now):
                self._outlier_detector.mark_probed(peer, equal)

    def _disconnect_silent(self, time: float) -> None:
        """Coverage counts who is linked; a link that nobody speaks on is none."""
        for peer, silence in self._failure_detector.silences(time):
            if silence >= self._settings.dead_seconds:
                self._registry.disconnect(peer, f"it has said nothing for {silence:.0f} s")

    def _undrain(self, peers: Collection[PeerId], now: float) -> None:
        self._slow.difference_update(peers)
        for peer in peers:
            self._migrations.undrain(peer, SLOW_CAUSE, now)

    # ---- answers to a Fence

    def _check_fence_acks(self, session: Session, now: float) -> None:
        waited = now - session.fenced_at
        if waited >= self._holds.fence_seconds(session.model):
            self._recovery.silent(session, now)
            return
        missing = {
            h.peer for h in session.hops if not h.answered and self._is_ack_overdue(h, session, now)
        }
        if missing and self._recovery.go_around(session, missing, now):
            for peer in missing:
                self._registry.eject(peer, "silent", now)

    def _is_ack_overdue(self, hop: Hop, session: Session, now: float) -> bool:
        """Whether an answer should have come. Who says other things meanwhile has a step to finish first."""
        patience = self._settings.answer_seconds + self._registry.health.step_times(hop.peer).longest_step
        asked = self._clock.elapsed(now) - (now - session.fenced_at)
        if self._failure_detector.has_message_since(hop.peer, asked) and not self._registry.health.step_times(hop.peer).is_hung:
            patience = max(patience, ALIVE_ACK_SECONDS)
        return now - session.fenced_at >= patience

    # ---- tokens

    def _check_tokens(self, sessions: Collection[Session], now: float) -> None:
        """Which of these have waited too long for the token that the swarm owes them."""
        time = self._clock.elapsed(now)
        before, self._progress = self._progress, {}
        reading: Counter[PeerId] = Counter()
        for session in sessions:
            progress = before.get(session.name) or Progress(session.epoch, session.length, time)
            progress.observe(session, time)
            self._progress[session.name] = progress
            if session.reading:
                reading.update({hop.peer: session.reading for hop in session.hops})
        for session in sessions:
            waited = time - self._progress[session.name].progress_at
            if waited < self._settings.overdue_seconds:
                continue
            if waited >= token_timeout(self._expected_seconds(session, reading, now), session.overdues):
                session.overdue = session.epoch
                session.overdues += 1
                self._recovery.fault(session, "overdue", session.hops[-1].peer, now)

    def _expected_seconds(self, session: Session, reading: Counter[PeerId], now: float) -> float:
        gap = self._progress[session.name].seconds_per_token
        rows = max(reading[hop.peer] for hop in session.hops)
        paces = [self._registry.health.step_times(hop.peer) for hop in session.hops]
        return expected_seconds(self._settings.overdue_seconds, gap, paces, rows, now)
