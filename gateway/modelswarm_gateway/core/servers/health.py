"""The health of each server: a score in (0, 1], and its ejection.

Pure; the part `registry.health` of the server registry. A server that was at fault, or is much slower than its peer
group, is ejected for a short time. Each repetition doubles that time. It returns by carrying one session, the canary.
A new process whose predecessors of the same name keep crashing (`crash_history.py`) gets a lower score. It must pass a
canary, too, and is never banned. Knows no sessions or routes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Heartbeat
from modelswarm_gateway.core.servers.crash_history import CrashHistory
from modelswarm_gateway.core.servers.server import IDLE_DECAY_SECONDS
from modelswarm_gateway.core.servers.step_times import StepTimes

# Least score.
MIN_SCORE = 0.05
# Time in seconds after which a fault counts half.
ERROR_HALF_LIFE = 30.0
# Duration in seconds of the first ejection.
BASE_EJECTION_TIME = 1.0
# Duration in seconds of the first ejection of a slow server, whose sessions are migrated meanwhile.
SLOW_EJECTION_TIME = 10.0
# Longest ejection, in seconds.
MAX_EJECTION_TIME = 120.0
# Time in seconds without a fault after which the next ejection counts as the first.
EJECTION_RESET = 300.0
# Number of disconnected servers that are remembered: the same process may reconnect.
MAX_DISCONNECTED = 1024
# Multiple of the peer group's block time up to which a server does not count as slower.
INSIGNIFICANT_RATIO = 1.5
# Share of free KV pages below which a server counts as under pressure.
LOW_KV_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """The health of a server as route choice sees it."""

    score: float = 1.0  # in (0, 1]; costs are divided by it
    ejected: bool = False  # left out of new routes while others hold its blocks
    canary: bool = (
        False  # needs one session as a proof of health, so it costs as little as a healthy server
    )


HEALTHY = HealthStatus()


@dataclass(slots=True)
class ServerHealth:
    """The history of one server."""

    step_times: StepTimes = field(default_factory=StepTimes)
    errors: float = 0.0  # faults, decayed to `last_fault_at`
    last_fault_at: float = 0.0
    ejections: int = 0  # in a row, without EJECTION_RESET between them
    ejected_until: float = 0.0
    on_canary: bool = False  # until it has carried a canary session
    slowness: float = 1.0  # its block time over that of its peer group
    free_kv_share: float = 1.0  # share of its KV pages that is free

    def recent_errors(self, now: float) -> float:
        """Return the faults, each of which counts half after ERROR_HALF_LIFE."""
        return self.errors * math.exp2(-max(0.0, now - self.last_fault_at) / ERROR_HALF_LIFE)

    def recent_slowness(self, now: float) -> float:
        """Return the slowness. It fades while the server is idle: without work it could never prove to be faster."""
        return 1.0 + (self.slowness - 1.0) * math.exp(
            -self.step_times.idle_seconds(now) / IDLE_DECAY_SECONDS
        )


class HealthTable:
    def __init__(self) -> None:
        self._records: dict[PeerId, ServerHealth] = {}
        self._disconnected: dict[PeerId, ServerHealth] = {}  # oldest first
        self._crashes = CrashHistory()
        self.on_canary: set[PeerId] = set()  # servers that must carry one session, or carry it now
        self._changed: set[PeerId] = set()  # servers whose step times have changed

    def add_server(self, peer: PeerId, now: float = 0.0) -> None:
        """Add a server that has connected.

        One that reconnects keeps its error count and must pass a canary. A new process starts with the number of
        recent crashes under its name, and must pass a canary if there are any.
        """
        self._changed.add(peer)
        crashes = self._crashes.on_start(peer, now)
        record = self._disconnected.pop(peer, None)
        if record is None and crashes:
            record = ServerHealth(errors=crashes, last_fault_at=now)
        if record is not None:
            record.on_canary = True
            self._records[peer] = record
            self.on_canary.add(peer)

    def remove_server(self, peer: PeerId, *, announced: bool = False) -> None:
        """`announced`: the server had said that it would stop."""
        if announced:
            self._crashes.on_announced_stop(peer)
        record = self._records.pop(peer, ServerHealth())
        self.on_canary.discard(peer)
        self._changed.discard(peer)
        record.step_times, record.slowness, record.free_kv_share = StepTimes(), 1.0, 1.0
        self._disconnected[peer] = record
        if len(self._disconnected) > MAX_DISCONNECTED:
            del self._disconnected[next(iter(self._disconnected))]

    def step_times(self, peer: PeerId) -> StepTimes:
        record = self._records.get(peer)
        return StepTimes() if record is None else record.step_times

    def record_heartbeat(self, peer: PeerId, heartbeat: Heartbeat, now: float) -> None:
        record = self._health_of(peer)
        if record.step_times.record_heartbeat(heartbeat, now):
            self._changed.add(peer)
        if heartbeat.total_pages:
            record.free_kv_share = heartbeat.free_pages / heartbeat.total_pages

    def eject(self, peer: PeerId, now: float, seconds: float = BASE_EJECTION_TIME) -> bool:
        """Eject a server for `seconds`, doubled with every ejection in a row. False if it is ejected already."""
        record = self._health_of(peer)
        if record.ejections and now - record.last_fault_at > EJECTION_RESET:
            record.ejections = 0
        record.errors = record.recent_errors(now) + 1.0
        record.last_fault_at = now
        first = now >= record.ejected_until
        if first:  # faults of one outage count as one
            record.ejections += 1
        pause = seconds * 2 ** min(record.ejections - 1, 16)
        record.ejected_until = now + min(pause, MAX_EJECTION_TIME)
        record.on_canary = True
        record.step_times.reset()
        self._changed.add(peer)
        self.on_canary.add(peer)
        return first

    def on_token(self, peer: PeerId, now: float) -> None:
        """A session on the server has a new token: a canary has passed, unless the ejection still lasts."""
        record = self._health_of(peer)
        if record.on_canary and now >= record.ejected_until:
            record.on_canary = False
            self.on_canary.discard(peer)

    def ejected_until(self, peer: PeerId) -> float:
        record = self._records.get(peer)
        return 0.0 if record is None else record.ejected_until

    def set_slowness(self, peer: PeerId, slowness: float) -> bool:
        """Set its block time as a multiple of that of its peer group. True if that changes the score."""
        record = self._health_of(peer)
        before, record.slowness = record.slowness, slowness
        return max(before, INSIGNIFICANT_RATIO) != max(slowness, INSIGNIFICANT_RATIO)

    def take_changed(self) -> set[PeerId]:
        """Return the servers whose step times have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def status(self, peer: PeerId, now: float, hops: int) -> HealthStatus:
        """Return the present status. `hops`: this gateway's hops there; on canary, a server gets one and no more."""
        record = self._records.get(peer)
        if record is None:
            return HEALTHY
        ejected = record.on_canary and (now < record.ejected_until or hops > 0)
        slow = min(1.0, INSIGNIFICANT_RATIO / max(record.recent_slowness(now), INSIGNIFICANT_RATIO))
        pressure = min(1.0, 0.5 + 0.5 * record.free_kv_share / LOW_KV_SHARE)
        score = slow * pressure / (1.0 + record.recent_errors(now))
        return HealthStatus(max(MIN_SCORE, score), ejected, canary=record.on_canary and not ejected)

    def _health_of(self, peer: PeerId) -> ServerHealth:
        return self._records.setdefault(peer, ServerHealth())
