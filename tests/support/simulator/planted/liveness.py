"""Planted bugs that only delay or eject: sessions without an owner, starvation, innocent servers.

The rules are R5 (recovery loop), R12 (admission), R20 (takeover) and R21 (detection). As in `protocol.py`: subclasses
of product classes, one rule broken in each. Each session gets its tokens in the end, so that only the oracles of
`liveness.py` find them.
"""

from __future__ import annotations

from collections.abc import Collection

from typing_extensions import override

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import FindSession
from modelswarm_gateway.core.detection.monitor import HealthMonitor
from modelswarm_gateway.core.detection.outlier_detector import OutlierDetector, PeerGroupKey
from modelswarm_gateway.core.detection.peer_comparison import Comparison
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.sessions.session import Session
from modelswarm_serving.core.fencing import Fencing
from modelswarm_serving.core.hops.hop import Hop
from modelswarm_serving.core.hops.peers import Peers
from modelswarm_serving.core.session_lookup import SessionLookup

LONG_SECONDS = 60.0


class IgnoresGoodbyes(Peers):
    """R20 (takeover): a gateway that ends by SIGTERM keeps its lease."""

    @override
    def on_heartbeat(self, peer: PeerId, draining: bool, now: float) -> None:
        super().on_heartbeat(peer, False, now)


class KeepsClaims(SessionLookup):
    """R20 (claims): a claim does not end before the link of its gateway."""

    @override
    def _claimant(self, peer: PeerId, find: FindSession, now: float) -> PeerId:
        claimant = super()._claimant(peer, find, now)
        if find.claims and not claimant:
            self._claims[find.session] = peer, self._peers.elapsed(now) + LONG_SECONDS
        return claimant


class NeverEndsGrants(Fencing):
    """R12 (admission): a hop without StartEpoch keeps its pages until the lease of its gateway ends."""

    @override
    def _renew_grant(self, hop: Hop, now: float) -> None:
        return


class EjectsWholeRoutes(Recovery):
    """R21 (failure detection): if one hop does not answer a Fence, all servers of its route are ejected."""

    @override
    def replan_without(
        self, session: Session, silent: set[PeerId], now: float, *, is_last: bool = False
    ) -> bool:
        route = {hop.peer for hop in session.hops}
        done = super().replan_without(session, silent, now, is_last=is_last)
        for peer in sorted(route if done and not is_last else ()):
            self._registry.eject(peer, "silent", now)
        return done


class EjectsSuspectRoutes(HealthMonitor):
    """R21 (failure detection): a silent server is ejected with all servers of the routes that it is on."""

    @override
    def _suspect(self, peer: PeerId, sessions: Collection[Session], now: float) -> None:
        for session in sessions:
            if any(hop.peer == peer for hop in session.hops):
                for hop in session.hops:
                    self._registry.eject(hop.peer, "silent", now)
        super()._suspect(peer, sessions, now)


class EjectsTypicalServers(OutlierDetector):
    """R21 (failure detection): a server is an outlier if it is slower than the median of its peers at all."""

    @override
    def _report_slowness(self, name: PeerGroupKey, comparison: Comparison) -> list[PeerId]:
        super()._report_slowness(name, comparison)
        return self._groups[name].peers_at(comparison.outliers(1.0, 0.0))
