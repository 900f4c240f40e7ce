"""The health monitor: drives all detectors at every tick and starts recovery for the faults that nothing reports.

Used by `gateway.py`, which passes every message and every tick. It finds silent servers, hops that do not acknowledge
a Fence, overdue tokens and outliers. It also finds stalls of our own event loop (R19, leases; R21, failure
detection). Does not know faults that are reported: a server's own FaultReport, broken links, and gaps in rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.detection.failure_detector import FailureDetector
from modelswarm_gateway.core.detection.outlier_detector import OutlierDetector
from modelswarm_gateway.core.detection.probes import Probes
from modelswarm_gateway.core.detection.stall_clock import StallClock
from modelswarm_gateway.core.detection.token_deadlines import (
    Progress,
    expected_seconds,
    is_token_due,
    token_timeout,
)
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.migration.migrations import Migrations
from modelswarm_gateway.core.recovery.hold_limit import HoldLimits
from modelswarm_gateway.core.recovery.ownership_check import OwnershipCheck
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.routing.server_registry import SLOW_CAUSE, ServerRegistry
from modelswarm_gateway.core.sessions.session import Hop, Session, SessionState

# Time in seconds between two runs of the outlier detector.
COMPARE_INTERVAL = 1.0
# Time in seconds without a tick that counts as a stall before the next tick: no batch of messages takes as long.
MIN_STALL = 1.0
# Time in seconds in which a server that sends other messages must acknowledge a Fence.
ALIVE_ACK_SECONDS = 2.0


class HealthMonitor:
    def __init__(
        self,
        settings: GatewaySettings,
        peer: PeerId,
        registry: ServerRegistry,
        hold_limits: HoldLimits,
        recovery: Recovery,
        migrations: Migrations,
        ownership_check: OwnershipCheck,
    ) -> None:
        """`peer` is this gateway."""
        self._settings = settings
        self._peer = peer
        self._registry = registry
        self._hold_limits = hold_limits
        self._recovery = recovery
        self._migrations = migrations
        self._ownership_check = ownership_check
        self._clock = StallClock()
        self._failure_detector = FailureDetector(settings.suspect_after_seconds)
        self._progress: dict[str, Progress] = {}
        self._outlier_detector = OutlierDetector(registry)
        self._probes = Probes(registry, migrations)
        self._compared_at = 0.0
        self._slow: set[PeerId] = set()  # servers drained because they are slow
        self.serving: set[PeerId] = set()  # servers that carry running routes

    def add_peer(self, peer: PeerId, heartbeat_seconds: float, now: float) -> None:
        self._failure_detector.add_peer(peer, self._clock.elapsed(now), heartbeat_seconds)
        self._outlier_detector.add_server(peer)

    def remove_peer(self, peer: PeerId, now: float) -> None:
        self._failure_detector.remove_peer(peer)
        self._outlier_detector.remove_server(peer)
        self._probes.remove_server(peer)
        self._undrain({peer} & self._slow, now)
        self._registry.set_suspected(self._failure_detector.suspected)

    def on_message(self, peer: PeerId, now: float) -> None:
        """Take any message of a server as a proof that it runs."""
        if self._failure_detector.on_message(peer, self._clock.elapsed(now)):
            self._registry.set_suspected(self._failure_detector.suspected)

    def detect_faults(self, sessions: Collection[Session], now: float) -> None:
        """Run all detectors."""
        self._count_stall(sessions, now)
        self.serving = {
            hop.peer for s in sessions if s.state is SessionState.RUNNING for hop in s.hops
        }
        self._registry.set_idle_hops(self._idle_canary_hops(sessions))
        time = self._clock.elapsed(now)
        self._failure_detector.set_monitored(self.serving, time)
        for peer in self._failure_detector.detect(time):
            self._suspect(peer, sessions, now)
        for session in sessions:
            if session.state is SessionState.FENCING:
                self._check_fence_acks(session, now)
        self._check_tokens([s for s in sessions if is_token_due(s)], now)
        self._outlier_detector.read_backlog(now)
        if now - self._compared_at >= COMPARE_INTERVAL:
            self._compared_at = now
            self._detect_outliers(sessions, now)
            self._disconnect_silent(time)

    def _idle_canary_hops(self, sessions: Collection[Session]) -> Counter[PeerId]:
        """Return the hops that no token is due on, by server on canary: of finished turns and of slow clients."""
        on_canary = self._registry.health.on_canary
        return Counter(
            hop.peer
            for session in (sessions if on_canary else ())
            if session.state is not SessionState.FENCING and not is_token_due(session)
            for hop in session.hops
            if hop.peer in on_canary
        )

    def _count_stall(self, sessions: Collection[Session], now: float) -> None:
        """Advance the stall clock. The time of a stall of our own counts against no session."""
        stalled = self._clock.advance(now)
        for session in sessions if stalled else ():
            session.fenced_at = min(now, session.fenced_at + stalled)
            if session.held_at is not None:  # servers may reconnect in a moment
                session.held_at = min(now, session.held_at + stalled)
            self._ownership_check.on_stall(session, stalled, now)

    def after_stall(self, sessions: Collection[Session], now: float) -> None:
        """Start recovery of all sessions after a stall of at least half a lease; called before anything else is done.

        Leases may have expired, and other gateways may own sessions now: none continues without a Fence (R19, leases).
        """
        delay, half_lease = self._clock.tick_delay(now), self._settings.lease_seconds / 2
        if delay > min(MIN_STALL, half_lease):
            self._count_stall(sessions, now)
        # A copy: a session without another attempt ends here, and leaves the core's table.
        for session in list(sessions) if delay > half_lease else ():
            self._ownership_check.require(session, now, since=now - delay)
            if session.state is not SessionState.HELD:
                self._recovery.on_fault(session, "late", self._peer, now)

    def _suspect(self, peer: PeerId, sessions: Collection[Session], now: float) -> None:
        """Eject a silent server and start recovery of every session on it, also of those that wait for its ack."""
        self._registry.set_suspected(self._failure_detector.suspected)
        self._registry.eject(peer, "silent", now)
        for session in sessions:
            if session.state is not SessionState.HELD and any(
                hop.peer == peer for hop in session.hops
            ):
                self._recovery.on_fault(session, "silent", peer, now)

    def _detect_outliers(self, sessions: Collection[Session], now: float) -> None:
        """Eject outliers and drain them until the ejection ends; start probe migrations of undecided servers."""
        over = {peer for peer in self._slow if now >= self._registry.health.ejected_until(peer)}
        self._undrain(over, now)
        for peer in self._outlier_detector.detect(now):
            self._registry.eject(peer, SLOW_CAUSE, now)
            self._slow.add(peer)
            self._migrations.drain(peer, SLOW_CAUSE, now)
        for peer in self._outlier_detector.undecided:
            if replica := self._probes.start_probe(peer, sessions, now):
                self._outlier_detector.mark_probed(peer, replica)

    def _disconnect_silent(self, time: float) -> None:
        """Close links without messages: coverage counts connected servers, so a dead link would feign coverage."""
        for peer, silence in self._failure_detector.silences(time):
            if silence >= self._settings.disconnect_after_seconds:
                self._registry.disconnect(peer, f"no message for {silence:.0f} s")

    def _undrain(self, peers: Collection[PeerId], now: float) -> None:
        self._slow.difference_update(peers)
        for peer in sorted(peers):
            self._migrations.undrain(peer, SLOW_CAUSE, now)

    # ---- acks of a Fence

    def _check_fence_acks(self, session: Session, now: float) -> None:
        waited = now - session.fenced_at
        if waited >= self._hold_limits.fence_timeout_seconds(session.model):
            silent = {hop.peer for hop in session.hops if not hop.is_fenced}
            self._recovery.replan_without(session, silent, now, is_last=True)
            return
        missing = {
            h.peer
            for h in session.hops
            if not h.is_fenced and self._is_ack_overdue(h, session, now)
        }
        if missing and self._recovery.replan_without(session, missing, now):
            for peer in sorted(missing):
                self._registry.eject(peer, "silent", now)

    def _is_ack_overdue(self, hop: Hop, session: Session, now: float) -> bool:
        """True if a hop's ack is overdue. A server that sends other messages may have to finish a step first."""
        steps = self._registry.health.step_times(hop.peer)
        timeout = self._settings.fence_ack_seconds + steps.longest_step
        fenced_at = self._clock.elapsed(now) - (now - session.fenced_at)
        if self._failure_detector.has_message_since(hop.peer, fenced_at) and not steps.is_hung:
            timeout = max(timeout, ALIVE_ACK_SECONDS)
        return now - session.fenced_at >= timeout

    # ---- tokens

    def _check_tokens(self, sessions: Collection[Session], now: float) -> None:
        """Start recovery of the sessions whose next token is overdue."""
        time = self._clock.elapsed(now)
        before, self._progress = self._progress, {}
        pending_rows: Counter[PeerId] = Counter()
        for session in sessions:
            progress = before.get(session.name) or Progress(session.epoch, session.progress, time)
            progress.observe(session, time)
            self._progress[session.name] = progress
            if session.pending_prefill_rows:
                pending_rows.update(
                    {hop.peer: session.pending_prefill_rows for hop in session.hops}
                )
        for session in sessions:
            waited = time - self._progress[session.name].progress_at
            if waited < self._settings.token_timeout_seconds:
                continue
            expected = self._expected_seconds(session, pending_rows, now)
            if waited >= token_timeout(expected, session.overdue_attempts):
                epoch = session.epoch
                session.overdue_attempts += 1
                self._recovery.on_fault(session, "overdue", session.hops[-1].peer, now)
                session.overdue_epoch = epoch  # for the loop that begins here, and no later one

    def _expected_seconds(
        self, session: Session, pending_rows: Counter[PeerId], now: float
    ) -> float:
        gap = self._progress[session.name].seconds_per_token
        rows = max(pending_rows[hop.peer] for hop in session.hops)
        steps = [self._registry.health.step_times(hop.peer) for hop in session.hops]
        return expected_seconds(self._settings.token_timeout_seconds, gap, steps, rows, now)
