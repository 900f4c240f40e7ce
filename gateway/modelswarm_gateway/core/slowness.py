"""Servers that are alive and much slower than their like: gray failures, found by comparison only.

Pure; `detection.py` asks once a second. Compared are the times per block of steps of the same size, among servers that
do the same work: as many blocks of the same kind, with or without the picking of tokens. In an overload all are
equally slow, and nobody is found. One other alone is not believed: it may be that its clock goes wrong. What this
gateway has seen itself decides then, or what servers of other blocks say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.fleet import Fleet
from modelswarm_gateway.core.kinds import Kind, kind_of
from modelswarm_gateway.core.pace import STALE

SLOW = 5.0  # times its like's median, and ...
FAR = 6.0  # deviations from it, by the median of deviations, which half of them cannot falsify
LEAST_SPREAD = 0.1  # of the median: what deviations are at least taken for
LOOKS = 3  # in a row that find a server slow
NOISE = 0.0001  # seconds per block; shorter ones are all alike
FRESH = 3.0  # seconds; what was seen before of a server says nothing of how slow it is now
SEEN = 0.5  # of the difference that two servers claim must be seen in the tokens that come by them
BEYOND = 2.0  # times the median of servers with other blocks, which do not quite the same work

Times = Mapping[int, float]  # seconds per block, by the size of steps
Alike = tuple[str, Kind, int, bool]  # model, kind, number of blocks, picks tokens


@dataclass(frozen=True, slots=True)
class _Seen:
    gap: float  # seconds between tokens, of the fastest session
    when: float


@dataclass(frozen=True, slots=True)
class Compared:
    ratio: float  # own time over the median of the others
    deviations: float  # between the two
    witnesses: int = 2  # others that it was found by
    difference: float = 0.0  # seconds per block, own minus theirs

    @property
    def slow(self) -> bool:
        return self.ratio >= SLOW and self.deviations >= FAR


def compare(own: Times, others: Sequence[Times]) -> Compared | None:
    """In the middle of all sizes of steps that others have made too; None if there are none."""
    found = []
    for size, seconds in own.items():
        known = [times[size] for times in others if size in times]
        if not known:
            continue
        typical, seconds = max(NOISE, median(known)), max(NOISE, seconds)
        spread = 1.4826 * median(abs(each - typical) for each in known)
        spread = max(spread, LEAST_SPREAD * typical)
        apart = seconds - typical
        found.append(Compared(seconds / typical, apart / spread, len(known), apart))
    if not found:
        return None
    found.sort(key=lambda compared: compared.ratio)
    least = min(compared.difference for compared in found)  # of steps that a token waits for
    return replace(found[len(found) // 2], difference=least)


class Slowness:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._looks: dict[PeerId, int] = {}
        self._seen: dict[PeerId, _Seen] = {}

    def saw(self, gaps: Iterable[tuple[Sequence[PeerId], float]], now: float) -> None:
        """The routes of sessions that run, and the seconds between the tokens that came by each."""
        best: dict[PeerId, float] = {}
        for route, gap in gaps:
            for peer in route if gap > 0 else ():
                best[peer] = min(gap, best.get(peer, gap))
        self._seen = {peer: s for peer, s in self._seen.items() if now - s.when <= STALE}
        self._seen.update({peer: _Seen(gap, now) for peer, gap in best.items()})

    def find(self, now: float) -> list[PeerId]:
        """Who is slow from now on, and can be done without: all of them together."""
        before, self._looks = self._looks, {}
        found: list[PeerId] = []
        groups = self._alike()
        times = {peer: self._times(peer, now) for peers in groups.values() for peer in peers}
        for peers in groups.values():
            for peer in peers:
                compared = self._compared(peer, groups, times, now) if times[peer] else None
                self._fleet.compared(peer, 1.0 if compared is None else compared.ratio)
                if compared is None or not compared.slow:
                    continue
                self._looks[peer] = before.get(peer, 0) + 1
                if self._looks[peer] >= LOOKS and self._fleet.spare(peer, now, found):
                    found.append(peer)
        for peer in found:
            del self._looks[peer]
        return found

    def _compared(
        self,
        peer: PeerId,
        groups: Mapping[Alike, list[PeerId]],
        times: Mapping[PeerId, Times],
        now: float,
    ) -> Compared | None:
        """None: nobody to compare with, or nobody who can be believed."""
        own = self._like(peer)
        others = [other for other in groups[own] if other != peer and times[other]]
        compared = compare(times[peer], [times[other] for other in others])
        if compared is None or not compared.slow or compared.witnesses > 1:
            return compared
        seen = self._difference(peer, others, now)
        if seen is not None:
            return compared if 0 < SEEN * compared.difference * own[2] <= seen else None
        beyond = [
            times[other]
            for like, peers in groups.items()
            for other in peers
            if like != own and like[:2] == own[:2]
        ]
        farther = compare(times[peer], beyond)
        return compared if farther is not None and farther.ratio >= BEYOND else None

    def _difference(self, peer: PeerId, others: Iterable[PeerId], now: float) -> float | None:
        """By how much longer a token takes by way of this server than by way of others; None: not seen lately."""
        mine = self._seen.get(peer)
        theirs = [self._seen[other].gap for other in others if other in self._seen]
        if mine is None or now - mine.when > FRESH or not theirs:
            return None
        return mine.gap - min(theirs)

    def _times(self, peer: PeerId, now: float) -> Times:
        server = self._fleet.get(peer)
        assert server is not None, "only servers that are linked are compared"
        return self._fleet.pace(peer).times(server.hello.last - server.hello.first, now)

    def _like(self, peer: PeerId) -> Alike:
        server = self._fleet.get(peer)
        assert server is not None, "only servers that are linked are compared"
        return alike(server.hello)

    def _alike(self) -> dict[Alike, list[PeerId]]:
        groups = defaultdict(list)
        for server in self._fleet:
            groups[alike(server.hello)].append(server.hello.peer)
        return groups


def alike(hello: Hello) -> Alike:
    """The same for servers whose steps can be compared."""
    return hello.model, kind_of(hello), hello.last - hello.first, hello.last == hello.n_blocks
