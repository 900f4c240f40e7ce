"""Servers that are alive and much slower than their like: gray failures, found by comparison only.

Pure; `detection.py` asks once a second. Compared are the times per block of steps of the same size, among servers that
do the same work: as many blocks of the same kind, with or without the picking of tokens. In an overload all are
equally slow, and nobody is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.fleet import Fleet
from modelswarm_gateway.core.kinds import Kind, kind_of

SLOW = 5.0  # times its like's median, and ...
FAR = 6.0  # deviations from it, by the median of deviations, which half of them cannot falsify
LEAST_SPREAD = 0.1  # of the median: what deviations are at least taken for
LOOKS = 3  # in a row that find a server slow, each by something new
NOISE = 0.0001  # seconds per block; shorter ones are all alike

Times = Mapping[int, float]  # seconds per block, by the size of steps


@dataclass(frozen=True, slots=True)
class Compared:
    ratio: float  # own time over the median of the others
    deviations: float  # between the two

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
        found.append(Compared(seconds / typical, (seconds - typical) / spread))
    found.sort(key=lambda compared: compared.ratio)
    return found[len(found) // 2] if found else None


@dataclass(frozen=True, slots=True)
class _Looks:
    """That found a server slow."""

    count: int = 0
    rows: int = -1  # that it had run by the last one

    def next(self, rows: int) -> _Looks:
        """What has been looked at before says nothing more."""
        return self if rows == self.rows else _Looks(self.count + 1, rows)


class Slowness:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._looks: dict[PeerId, _Looks] = {}

    def find(self, now: float) -> list[PeerId]:
        """Who is slow from now on, and can be done without: all of them together."""
        before, self._looks = self._looks, {}
        found: list[PeerId] = []
        for peers in self._alike().values():
            times = {peer: self._times(peer, now) for peer in peers}
            for peer in peers:
                others = [times[other] for other in peers if other != peer]
                compared = compare(times[peer], others) if times[peer] else None
                self._fleet.compared(peer, 1.0 if compared is None else compared.ratio)
                if compared is None or not compared.slow:
                    continue
                looks = before.get(peer, _Looks()).next(self._fleet.pace(peer).rows)
                self._looks[peer] = looks
                if looks.count >= LOOKS and self._fleet.spare(peer, now, found):
                    found.append(peer)
        for peer in found:
            del self._looks[peer]
        return found

    def _times(self, peer: PeerId, now: float) -> Times:
        server = self._fleet.get(peer)
        assert server is not None, "only servers that are linked are compared"
        return self._fleet.pace(peer).times(server.hello.last - server.hello.first, now)

    def _alike(self) -> dict[tuple[str, Kind, int, bool], list[PeerId]]:
        groups = defaultdict(list)
        for server in self._fleet:
            groups[alike(server.hello)].append(server.hello.peer)
        return groups


def alike(hello: Hello) -> tuple[str, Kind, int, bool]:
    """The same for servers whose steps can be compared."""
    return hello.model, kind_of(hello), hello.last - hello.first, hello.last == hello.n_blocks
