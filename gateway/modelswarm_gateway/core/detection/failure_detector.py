"""Failure detector: a server is suspected when it has been silent for its timeout (R21, failure detection).

The timeout is four times the longest interval that the server usually leaves between messages. Pure; used by
`monitor.py`, which says which servers carry running routes: only these are monitored. Times are those of the stall
clock. Any message proves that a server runs, but intervals are learnt only from monitored servers: all others send a
heartbeat every 5 s. Knows no sessions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from modelswarm.protocol.identity import PeerId

# Interval in seconds between the heartbeats of a server on a running route.
HEARTBEAT_INTERVAL = 0.1
# Least interval in seconds that is learnt: shorter ones are between tokens and say nothing of heartbeats.
MIN_INTERVAL = HEARTBEAT_INTERVAL / 2
# Interval in seconds that is assumed until a server has sent MIN_SAMPLES messages.
FIRST_ESTIMATE = 2 * HEARTBEAT_INTERVAL
# Number of intervals from which the learnt ones replace the assumed one.
MIN_SAMPLES = 16
# Number of intervals that are kept.
MAX_SAMPLES = 128
# Timeout in usual longest intervals.
TIMEOUT_INTERVALS = 4.0
# Greatest timeout in seconds, whatever the intervals of a server have been.
MAX_TIMEOUT = 2.0
# Greatest heartbeat interval in seconds that a server may declare; a longer one counts as this.
MAX_HEARTBEAT_INTERVAL = 5.0
# Least timeout in declared heartbeat intervals.
MIN_TIMEOUT_HEARTBEATS = 3.0


def min_timeout(suspect_after_seconds: float, heartbeat_seconds: float) -> float:
    """Return the least timeout of a server that has declared its heartbeat interval (0: it has not)."""
    interval = min(heartbeat_seconds, MAX_HEARTBEAT_INTERVAL)
    return (
        suspect_after_seconds
        if 2 * interval <= suspect_after_seconds
        else MIN_TIMEOUT_HEARTBEATS * interval
    )


class HeartbeatIntervals:
    """The last intervals between messages of one server, by arrival and by size."""

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
        """The longest usual interval in seconds."""
        count = len(self._sorted)
        longest = self._sorted[-1 - count // 100] if count else 0.0
        return longest if count >= MIN_SAMPLES else max(longest, FIRST_ESTIMATE)


@dataclass(slots=True)
class _PeerState:
    last_message: float
    min_timeout: float
    monitored_since: float | None = (
        None  # since then it carries a running route and sends frequent heartbeats
    )
    intervals: HeartbeatIntervals = field(default_factory=HeartbeatIntervals)
    suspected: bool = False


class FailureDetector:
    def __init__(self, suspect_after_seconds: float) -> None:
        """`suspect_after_seconds`: the least timeout."""
        self._min_timeout = suspect_after_seconds
        self._peers: dict[PeerId, _PeerState] = {}
        self._monitored: set[PeerId] = set()
        self.suspected: frozenset[PeerId] = frozenset()

    def add_peer(self, peer: PeerId, time: float, heartbeat_seconds: float = 0.0) -> None:
        self._peers[peer] = _PeerState(time, min_timeout(self._min_timeout, heartbeat_seconds))

    def remove_peer(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)
        self._monitored.discard(peer)
        self.suspected -= {peer}

    def on_message(self, peer: PeerId, time: float) -> bool:
        """Take a message of a server. True if it ends a suspicion."""
        state = self._peers.get(peer)
        if state is None:
            return False
        interval, state.last_message = time - state.last_message, time
        if state.suspected:  # the length of an outage says nothing of heartbeats
            state.suspected = False
            self.suspected -= {peer}
            return True
        since = state.monitored_since
        if since is not None and time - interval >= since and interval >= MIN_INTERVAL:
            state.intervals.add_interval(interval)
        return False

    def set_monitored(self, peers: Iterable[PeerId], time: float) -> None:
        """Set the servers that carry running routes: these and no others."""
        wanted = {peer for peer in peers if peer in self._peers}
        for peer in self._monitored - wanted:
            self._peers[peer].monitored_since = None
        for peer in wanted - self._monitored:
            self._peers[peer].monitored_since = time
        self._monitored = wanted

    def silence_of(self, peer: PeerId, time: float) -> float:
        """Return the seconds without a message in which a monitored server should have sent heartbeats."""
        state = self._peers[peer]
        return time - max(state.last_message, state.monitored_since or 0.0)

    def timeout(self, peer: PeerId) -> float:
        """Return the silence in seconds from which a monitored server is suspected."""
        state = self._peers[peer]
        return max(state.min_timeout, min(TIMEOUT_INTERVALS * state.intervals.p99, MAX_TIMEOUT))

    def detect(self, time: float) -> list[PeerId]:
        """Return the servers that are suspected from now on."""
        found = [
            peer
            for peer in sorted(self._monitored - self.suspected)
            if self.silence_of(peer, time) >= self.timeout(peer)
        ]
        for peer in found:
            self._peers[peer].suspected = True
        self.suspected = self.suspected.union(found)
        return found

    def has_message_since(self, peer: PeerId, time: float) -> bool:
        """True if the server has sent a message after `time`."""
        state = self._peers.get(peer)
        return state is not None and state.last_message > time

    def silences(self, time: float) -> list[tuple[PeerId, float]]:
        """Return all servers with the seconds since their last message."""
        return [(peer, time - state.last_message) for peer, state in self._peers.items()]
