"""Which servers have fallen silent (R21): no sign of life for four times the longest gap they usually leave.

Pure; used by `detection.py`, which says who carries live routes. Times are of the awake clock. Anything a server says
is a sign of life, but gaps are learnt only from servers on live routes: all others beat every 5 s. Knows no sessions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from modelswarm.protocol.identity import PeerId

HEARTBEAT_INTERVAL = 0.1  # seconds between beats on a live route
MIN_INTERVAL = HEARTBEAT_INTERVAL / 2  # shorter ones are of tokens, and say nothing of beats
FIRST_ESTIMATE = 2 * HEARTBEAT_INTERVAL  # what is believed of a server until it has been seen to beat ...
MIN_SAMPLES = 16  # ... so often
MAX_SAMPLES = 128
TIMEOUT_INTERVALS = 4.0
MAX_TIMEOUT = 2.0  # seconds; whatever a server's gaps have been
MAX_HEARTBEAT_INTERVAL = 5.0  # seconds; nobody is believed to beat less often
MIN_TIMEOUT_HEARTBEATS = 3.0


def min_timeout(silent_seconds: float, beat_seconds: float) -> float:
    """Silence shorter than this is never suspicious of a server that has told how often it beats (0: it has not)."""
    beat = min(beat_seconds, MAX_HEARTBEAT_INTERVAL)
    return silent_seconds if 2 * beat <= silent_seconds else MIN_TIMEOUT_HEARTBEATS * beat


class HeartbeatIntervals:
    """The last gaps between signs of life, sorted beside."""

    def __init__(self) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def add_interval(self, seconds: float) -> None:
        if len(self._order) >= MAX_SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(seconds)
        insort(self._sorted, seconds)

    @property
    def p99(self) -> float:
        count = len(self._sorted)
        longest = self._sorted[-1 - count // 100] if count else 0.0
        return longest if count >= MIN_SAMPLES else max(longest, FIRST_ESTIMATE)


@dataclass(slots=True)
class _PeerState:
    last_message: float  # last sign of life
    min_timeout: float  # seconds of silence that are never suspicious
    monitored_since: float | None = None  # since when it carries a live route, and is expected to beat often
    intervals: HeartbeatIntervals = field(default_factory=HeartbeatIntervals)
    suspected: bool = False


class FailureDetector:
    def __init__(self, silent_seconds: float) -> None:
        """`silent_seconds`: shorter silence is never suspicious."""
        self._min_timeout = silent_seconds
        self._peers: dict[PeerId, _PeerState] = {}
        self._monitored: set[PeerId] = set()
        self.suspected: frozenset[PeerId] = frozenset()

    def add_peer(self, peer: PeerId, time: float, beat_seconds: float = 0.0) -> None:
        self._peers[peer] = _PeerState(time, min_timeout(self._min_timeout, beat_seconds))

    def remove_peer(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)
        self._monitored.discard(peer)
        self.suspected -= {peer}

    def on_message(self, peer: PeerId, time: float) -> bool:
        """A sign of life. True when it ends a suspicion."""
        vital = self._peers.get(peer)
        if vital is None:
            return False
        gap, vital.last_message = time - vital.last_message, time
        if vital.suspected:  # how long an outage was says nothing of beats
            vital.suspected = False
            self.suspected -= {peer}
            return True
        if vital.monitored_since is not None and time - gap >= vital.monitored_since and gap >= MIN_INTERVAL:
            vital.intervals.add_interval(gap)
        return False

    def set_monitored(self, peers: Iterable[PeerId], time: float) -> None:
        """These carry live routes now, and no others."""
        wanted = {peer for peer in peers if peer in self._peers}
        for peer in self._monitored - wanted:
            self._peers[peer].monitored_since = None
        for peer in wanted - self._monitored:
            self._peers[peer].monitored_since = time
        self._monitored = wanted

    def silence_of(self, peer: PeerId, time: float) -> float:
        """Seconds without a sign of life; of a server on a live route, those that it should have beaten in."""
        vital = self._peers[peer]
        return time - max(vital.last_message, vital.monitored_since or 0.0)

    def timeout(self, peer: PeerId) -> float:
        """The silence that is suspicious, of a server on a live route."""
        vital = self._peers[peer]
        return max(vital.min_timeout, min(TIMEOUT_INTERVALS * vital.intervals.p99, MAX_TIMEOUT))

    def detect(self, time: float) -> list[PeerId]:
        """Who is suspected from now on."""
        found = [
            peer
            for peer in sorted(self._monitored - self.suspected)
            if self.silence_of(peer, time) >= self.timeout(peer)
        ]
        for peer in found:
            self._peers[peer].suspected = True
        self.suspected = self.suspected.union(found)
        return found

    def interval_factor(self, peer: PeerId) -> float:
        """How much longer than a beat's the longest usual gap of a server is, as a factor."""
        vital = self._peers.get(peer)
        return 1.0 if vital is None else max(1.0, vital.intervals.p99 / (2 * HEARTBEAT_INTERVAL))

    def has_message_since(self, peer: PeerId, time: float) -> bool:
        """Whether there was a sign of life after `time`."""
        vital = self._peers.get(peer)
        return vital is not None and vital.last_message > time

    def silences(self, time: float) -> list[tuple[PeerId, float]]:
        """All servers, with the seconds since their last sign of life."""
        return [(peer, time - vital.last_message) for peer, vital in self._peers.items()]
