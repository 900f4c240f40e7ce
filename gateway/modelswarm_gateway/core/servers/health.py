"""How well each server does, against others like it: one score, and whether it is ejected.

Pure; used by `fleet.py`. A server that was at fault, or is much slower than its like, is ejected for a short time, for
twice as long when it happens again, and comes back by carrying one session, the canary. So does a new process whose
forerunners under its name keep dying (`lives.py`): it is dearer, and never banned. Knows no sessions or routes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Beat
from modelswarm_gateway.core.servers.crash_history import Lives
from modelswarm_gateway.core.servers.server import FORGET_SECONDS
from modelswarm_gateway.core.servers.step_times import Pace

LEAST_SCORE = 0.05
ERROR_HALF_LIFE = 30.0  # seconds
EJECTION = 1.0  # seconds, the first time
SLOW_EJECTION = 10.0  # ... of a slow one, whose sessions are moved meanwhile
LONGEST_EJECTION = 120.0
FORGIVEN = 300.0  # seconds without a fault, after which an ejection is the first again
REMEMBERED = 1024  # servers that are gone: the same process may come back
ALIKE = 1.5  # times its like's block time: so much slower is not slower
FULL = 0.1  # share of free KV pages below which a server counts as under pressure


@dataclass(frozen=True, slots=True)
class Standing:
    score: float = 1.0  # in (0, 1]; costs are divided by it
    ejected: bool = False  # left out of new routes while others hold its blocks
    canary: bool = False  # wants one session, to show that it is well again: as cheap as if it were


WELL = Standing()


@dataclass(slots=True)
class Record:
    """What is known of one server."""

    pace: Pace = field(default_factory=Pace)
    errors: float = 0.0  # faults, each half forgotten after a while
    struck_at: float = 0.0
    strikes: int = 0
    until: float = 0.0  # ejected so long
    trial: bool = False  # until it has carried a canary
    slowness: float = 1.0  # its block time over that of its like
    free: float = 1.0  # share of its KV pages

    def decayed(self, now: float) -> float:
        return self.errors * math.exp2(-max(0.0, now - self.struck_at) / ERROR_HALF_LIFE)

    def slow(self, now: float) -> float:
        """Its slowness, which fades while it has nothing to do: nobody would give it the work to show better."""
        return 1.0 + (self.slowness - 1.0) * math.exp(-self.pace.idle(now) / FORGET_SECONDS)


class Health:
    def __init__(self) -> None:
        self._records: dict[PeerId, Record] = {}
        self._gone: dict[PeerId, Record] = {}  # of servers whose link is down, oldest first
        self._lives = Lives()
        self.on_trial: set[PeerId] = set()
        self._news: set[PeerId] = set()  # whose pace has changed

    def join(self, peer: PeerId, now: float = 0.0) -> None:
        """One that is back, and no new process, has its faults still, and a canary to carry; so has one whose
        forerunners died of late, as often as they did."""
        self._news.add(peer)
        deaths = self._lives.begin(peer, now)
        record = self._gone.pop(peer, None)
        if record is None and deaths:
            record = Record(errors=deaths, struck_at=now)
        if record is not None:
            record.trial = True
            self._records[peer] = record
            self.on_trial.add(peer)

    def leave(self, peer: PeerId, *, as_said: bool = False) -> None:
        """`as_said`: it had told that it would end."""
        if as_said:
            self._lives.end(peer)
        record = self._records.pop(peer, Record())
        self.on_trial.discard(peer)
        self._news.discard(peer)
        record.pace, record.slowness, record.free = Pace(), 1.0, 1.0
        self._gone[peer] = record
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def pace(self, peer: PeerId) -> Pace:
        record = self._records.get(peer)
        return Pace() if record is None else record.pace

    def beat(self, peer: PeerId, beat: Beat, now: float) -> None:
        record = self._of(peer)
        if record.pace.beat(beat, now):
            self._news.add(peer)
        if beat.total_pages:
            record.free = beat.free_pages / beat.total_pages

    def strike(self, peer: PeerId, now: float, seconds: float = EJECTION) -> bool:
        """It was at fault: ejected, each time for twice as long. False if it is ejected already."""
        record = self._of(peer)
        if record.strikes and now - record.struck_at > FORGIVEN:
            record.strikes = 0
        record.errors = record.decayed(now) + 1.0
        record.struck_at = now
        first = now >= record.until
        if first:  # faults of one outage count as one
            record.strikes += 1
        pause = seconds * 2 ** min(record.strikes - 1, 16)
        record.until = now + min(pause, LONGEST_EJECTION)
        record.trial = True
        record.pace.restart()
        self._news.add(peer)
        self.on_trial.add(peer)
        return first

    def served(self, peer: PeerId, now: float) -> None:
        """A session that runs there has a new token: the canary lives."""
        record = self._of(peer)
        if record.trial and now >= record.until:
            record.trial = False
            self.on_trial.discard(peer)

    def ejected_until(self, peer: PeerId) -> float:
        record = self._records.get(peer)
        return 0.0 if record is None else record.until

    def compared(self, peer: PeerId, slowness: float) -> bool:
        """Its block time, as a multiple of that of its like. Whether that makes another score."""
        record = self._of(peer)
        before, record.slowness = record.slowness, slowness
        return max(before, ALIKE) != max(slowness, ALIKE)

    def take_news(self) -> set[PeerId]:
        """Servers whose pace has changed since this was asked last."""
        news, self._news = self._news, set()
        return news

    def standing(self, peer: PeerId, now: float, hops: int) -> Standing:
        """`hops`: how many it carries for us. On trial it is given one session and no more."""
        record = self._records.get(peer)
        if record is None:
            return WELL
        ejected = record.trial and (now < record.until or hops > 0)
        slow = min(1.0, ALIKE / max(record.slow(now), ALIKE))
        pressed = 1.0 if record.free >= FULL else 0.5 + 0.5 * record.free / FULL
        score = slow * pressed / (1.0 + record.decayed(now))
        return Standing(max(LEAST_SCORE, score), ejected, canary=record.trial and not ejected)

    def _of(self, peer: PeerId) -> Record:
        return self._records.setdefault(peer, Record())
