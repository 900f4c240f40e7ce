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

BEAT_GAP = 0.1  # seconds between beats on a live route
LEAST_GAP = BEAT_GAP / 2  # shorter ones are of tokens, and say nothing of beats
FIRST_GAP = 2 * BEAT_GAP  # what is believed of a server until it has been seen to beat ...
ENOUGH_GAPS = 16  # ... so often
KEPT_GAPS = 128
GAPS_OF_SILENCE = 4.0
LONGEST_SILENCE = 2.0  # seconds; whatever a server's gaps have been
LONGEST_BEAT = 5.0  # seconds; nobody is believed to beat less often
BEATS_OF_SILENCE = 3.0


def least_silence(silent_seconds: float, beat_seconds: float) -> float:
    """Silence shorter than this is never suspicious of a server that has told how often it beats (0: it has not)."""
    beat = min(beat_seconds, LONGEST_BEAT)
    return silent_seconds if 2 * beat <= silent_seconds else BEATS_OF_SILENCE * beat


class Gaps:
    """The last gaps between signs of life, sorted beside."""

    def __init__(self) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, gap: float) -> None:
        if len(self._order) >= KEPT_GAPS:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(gap)
        insort(self._sorted, gap)

    @property
    def p99(self) -> float:
        count = len(self._sorted)
        longest = self._sorted[-1 - count // 100] if count else 0.0
        return longest if count >= ENOUGH_GAPS else max(longest, FIRST_GAP)


@dataclass(slots=True)
class _Vital:
    heard: float  # last sign of life
    least: float  # seconds of silence that are never suspicious
    live: float | None = None  # since when it carries a live route, and is expected to beat often
    gaps: Gaps = field(default_factory=Gaps)
    suspected: bool = False


class Suspicion:
    def __init__(self, silent_seconds: float) -> None:
        """`silent_seconds`: shorter silence is never suspicious."""
        self._least = silent_seconds
        self._vitals: dict[PeerId, _Vital] = {}
        self._live: set[PeerId] = set()
        self.suspected: frozenset[PeerId] = frozenset()

    def join(self, peer: PeerId, time: float, beat_seconds: float = 0.0) -> None:
        self._vitals[peer] = _Vital(time, least_silence(self._least, beat_seconds))

    def leave(self, peer: PeerId) -> None:
        self._vitals.pop(peer, None)
        self._live.discard(peer)
        self.suspected -= {peer}

    def heard(self, peer: PeerId, time: float) -> bool:
        """A sign of life. True when it ends a suspicion."""
        vital = self._vitals.get(peer)
        if vital is None:
            return False
        gap, vital.heard = time - vital.heard, time
        if vital.suspected:  # how long an outage was says nothing of beats
            vital.suspected = False
            self.suspected -= {peer}
            return True
        if vital.live is not None and time - gap >= vital.live and gap >= LEAST_GAP:
            vital.gaps.add(gap)
        return False

    def expect(self, live: Iterable[PeerId], time: float) -> None:
        """These carry live routes now, and no others."""
        wanted = {peer for peer in live if peer in self._vitals}
        for peer in self._live - wanted:
            self._vitals[peer].live = None
        for peer in wanted - self._live:
            self._vitals[peer].live = time
        self._live = wanted

    def silence(self, peer: PeerId, time: float) -> float:
        """Seconds without a sign of life; of a server on a live route, those that it should have beaten in."""
        vital = self._vitals[peer]
        return time - max(vital.heard, vital.live or 0.0)

    def patience(self, peer: PeerId) -> float:
        """The silence that is suspicious, of a server on a live route."""
        vital = self._vitals[peer]
        return max(vital.least, min(GAPS_OF_SILENCE * vital.gaps.p99, LONGEST_SILENCE))

    def find(self, time: float) -> list[PeerId]:
        """Who is suspected from now on."""
        found = [
            peer
            for peer in sorted(self._live - self.suspected)
            if self.silence(peer, time) >= self.patience(peer)
        ]
        for peer in found:
            self._vitals[peer].suspected = True
        self.suspected = self.suspected.union(found)
        return found

    def lateness(self, peer: PeerId) -> float:
        """How much longer than a beat's the longest usual gap of a server is, as a factor."""
        vital = self._vitals.get(peer)
        return 1.0 if vital is None else max(1.0, vital.gaps.p99 / (2 * BEAT_GAP))

    def said_since(self, peer: PeerId, time: float) -> bool:
        """Whether there was a sign of life after `time`."""
        vital = self._vitals.get(peer)
        return vital is not None and vital.heard > time

    def unheard(self, time: float) -> list[tuple[PeerId, float]]:
        """All servers, with the seconds since their last sign of life."""
        return [(peer, time - vital.heard) for peer, vital in self._vitals.items()]
