"""How well each server does, against others like it: one score, and whether it is ejected.

Pure; used by `server_registry.py`. A server that was at fault, or is much slower than its like, is ejected for a short time, for
twice as long when it happens again, and comes back by carrying one session, the canary. So does a new process whose
forerunners under its name keep dying (`lives.py`): it is dearer, and never banned. Knows no sessions or routes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Heartbeat
from modelswarm_gateway.core.servers.crash_history import CrashHistory
from modelswarm_gateway.core.servers.server import IDLE_DECAY_SECONDS
from modelswarm_gateway.core.servers.step_times import StepTimes

MIN_SCORE = 0.05
ERROR_HALF_LIFE = 30.0  # seconds
BASE_EJECTION_TIME = 1.0  # seconds, the first time
SLOW_EJECTION_TIME = 10.0  # ... of a slow one, whose sessions are moved meanwhile
MAX_EJECTION_TIME = 120.0
EJECTION_RESET = 300.0  # seconds without a fault, after which an ejection is the first again
MAX_DISCONNECTED = 1024  # servers that are gone: the same process may come back
INSIGNIFICANT_RATIO = 1.5  # times its like's block time: so much slower is not slower
LOW_KV_SHARE = 0.1  # share of free KV pages below which a server counts as under pressure


@dataclass(frozen=True, slots=True)
class HealthStatus:
    score: float = 1.0  # in (0, 1]; costs are divided by it
    ejected: bool = False  # left out of new routes while others hold its blocks
    canary: bool = False  # wants one session, to show that it is well again: as cheap as if it were


HEALTHY = HealthStatus()


@dataclass(slots=True)
class ServerHealth:
    """What is known of one server."""

    step_times: StepTimes = field(default_factory=StepTimes)
    errors: float = 0.0  # faults, each half forgotten after a while
    last_fault_at: float = 0.0
    ejections: int = 0
    ejected_until: float = 0.0  # ejected so long
    on_canary: bool = False  # until it has carried a canary
    slowness: float = 1.0  # its block time over that of its like
    free_kv_share: float = 1.0  # share of its KV pages

    def recent_errors(self, now: float) -> float:
        return self.errors * math.exp2(-max(0.0, now - self.last_fault_at) / ERROR_HALF_LIFE)

    def recent_slowness(self, now: float) -> float:
        """Its slowness, which fades while it has nothing to do: nobody would give it the work to show better."""
        return 1.0 + (self.slowness - 1.0) * math.exp(-self.step_times.idle_seconds(now) / IDLE_DECAY_SECONDS)


class HealthTable:
    def __init__(self) -> None:
        self._records: dict[PeerId, ServerHealth] = {}
        self._disconnected: dict[PeerId, ServerHealth] = {}  # of servers whose link is down, oldest first
        self._crashes = CrashHistory()
        self.on_canary: set[PeerId] = set()
        self._changed: set[PeerId] = set()  # whose pace has changed

    def add_server(self, peer: PeerId, now: float = 0.0) -> None:
        """One that is back, and no new process, has its faults still, and a canary to carry; so has one whose
        forerunners died of late, as often as they did."""
        self._changed.add(peer)
        deaths = self._crashes.on_start(peer, now)
        record = self._disconnected.pop(peer, None)
        if record is None and deaths:
            record = ServerHealth(errors=deaths, last_fault_at=now)
        if record is not None:
            record.on_canary = True
            self._records[peer] = record
            self.on_canary.add(peer)

    def remove_server(self, peer: PeerId, *, announced: bool = False) -> None:
        """`as_said`: it had told that it would end."""
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
        """It was at fault: ejected, each time for twice as long. False if it is ejected already."""
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
        """A session that runs there has a new token: the canary lives."""
        record = self._health_of(peer)
        if record.on_canary and now >= record.ejected_until:
            record.on_canary = False
            self.on_canary.discard(peer)

    def ejected_until(self, peer: PeerId) -> float:
        record = self._records.get(peer)
        return 0.0 if record is None else record.ejected_until

    def set_slowness(self, peer: PeerId, slowness: float) -> bool:
        """Its block time, as a multiple of that of its like. Whether that makes another score."""
        record = self._health_of(peer)
        before, record.slowness = record.slowness, slowness
        return max(before, INSIGNIFICANT_RATIO) != max(slowness, INSIGNIFICANT_RATIO)

    def take_changed(self) -> set[PeerId]:
        """Servers whose pace has changed since this was asked last."""
        news, self._changed = self._changed, set()
        return news

    def status(self, peer: PeerId, now: float, hops: int) -> HealthStatus:
        """`hops`: how many it carries for us. On trial it is given one session and no more."""
        record = self._records.get(peer)
        if record is None:
            return HEALTHY
        ejected = record.on_canary and (now < record.ejected_until or hops > 0)
        slow = min(1.0, INSIGNIFICANT_RATIO / max(record.recent_slowness(now), INSIGNIFICANT_RATIO))
        pressed = 1.0 if record.free_kv_share >= LOW_KV_SHARE else 0.5 + 0.5 * record.free_kv_share / LOW_KV_SHARE
        score = slow * pressed / (1.0 + record.recent_errors(now))
        return HealthStatus(max(MIN_SCORE, score), ejected, canary=record.on_canary and not ejected)

    def _health_of(self, peer: PeerId) -> ServerHealth:
        return self._records.setdefault(peer, ServerHealth())
