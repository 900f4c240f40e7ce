"""Servers that are alive and much slower than their like: gray failures, found by comparison only.

`detection.py` asks once a second; `alike.py` compares. Compared are the times per block of steps of the same size,
among servers that do the same work: as many blocks of the same kind, with or without the picking of tokens. In an
overload all are equally slow, and nobody is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.detection.peer_comparison import Alike, Look, side_by_side
from modelswarm_gateway.core.routing.server_registry import Fleet
from modelswarm_gateway.core.servers.health import ALIKE
from modelswarm_gateway.core.servers.variant import Kind, kind_of

SLOW = 5.0  # times its like's median, and ...
FAR = 6.0  # deviations from it, by the median of deviations, which half of them cannot falsify
MOST_UNREAD = 128  # news that may wait for a look; of more ...
MOST_READ = 128  # ... so many are read at a tick
LOOKS = 3  # in a row that find a server slow, each by something new

Group: TypeAlias = tuple[str, Kind, int, bool]


@dataclass(frozen=True, slots=True)
class _Looks:
    """That found a server slow."""

    count: int = 0
    rows: int = -1  # that had been run by the last one

    def next(self, rows: int) -> _Looks:
        """What has been looked at before says nothing more."""
        return self if rows == self.rows else _Looks(self.count + 1, rows)


class Slowness:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._groups: dict[Group, Alike] = {}
        self._group_of: dict[PeerId, Group] = {}
        self._looks: dict[PeerId, _Looks] = {}  # of those that are slow, ...
        self._doubts: dict[PeerId, _Looks] = {}  # ... and of those that may be
        self._tried: dict[PeerId, PeerId] = {}
        self._unread: set[PeerId] = set()  # who has said something new

    def joined(self, peer: PeerId) -> None:
        self.left(peer)
        server = self._fleet.get(peer)
        assert server is not None, "only servers that are linked are compared"
        name = self._group_of[peer] = alike(server.hello)
        self._groups.setdefault(name, Alike()).add(peer)

    def left(self, peer: PeerId) -> None:
        name = self._group_of.pop(peer, None)
        if name is None:
            return
        for each in (self._looks, self._doubts, self._tried):
            each.pop(peer, None)
        self._groups[name].remove(peer)
        if not self._groups[name]:
            del self._groups[name]

    def find(self, now: float) -> list[PeerId]:
        """Who is slow from now on, and can be done without: all of them together, the slowest first."""
        self._read_all(now)
        looks = {name: group.look() for name, group in self._groups.items()}
        self._doubts = self._counted(self._doubtful(looks), self._doubts)
        slow = [peer for name, look in looks.items() for peer in self._slow(name, look)]
        self._looks = self._counted(slow, self._looks)
        found: list[PeerId] = []
        for peer, seen in self._looks.items():
            if seen.count >= LOOKS and self._fleet.spare(peer, now, found):
                found.append(peer)
        for peer in found:
            del self._looks[peer]
            self._tried.pop(peer, None)
        return found

    @property
    def doubtful(self) -> list[PeerId]:
        """Who looks slow, and has nobody to be compared with."""
        return [peer for peer, seen in self._doubts.items() if seen.count >= LOOKS]

    def tried(self, peer: PeerId, equal: PeerId) -> None:
        """A session of a doubtful one runs on its equal from now on: what that does says something of both."""
        self._tried[peer] = equal

    def _counted(
        self, peers: Sequence[PeerId], before: Mapping[PeerId, _Looks]
    ) -> dict[PeerId, _Looks]:
        return {peer: before.get(peer, _Looks()).next(self._rows(peer)) for peer in peers}

    def _rows(self, peer: PeerId) -> int:
        """What grows with all that is new about it."""
        equal = self._tried.get(peer)
        rows = self._fleet.pace(equal).rows if equal is not None else 0
        return self._fleet.pace(peer).rows + rows

    def read_some(self, now: float) -> None:
        """At every tick: of very many news not all are left for the next look, which would take long."""
        self._unread |= self._fleet.take_news()
        for _ in range(min(MOST_READ, len(self._unread) - MOST_UNREAD)):
            self._read(self._unread.pop(), now)

    def _read_all(self, now: float) -> None:
        """The times of those that have said something new, or nothing for too long."""
        peers = self._unread | self._fleet.take_news()
        self._unread = set()
        for group in self._groups.values():
            peers.update(group.peers[row] for row in np.flatnonzero(group.until <= now))
        for peer in peers:
            self._read(peer, now)

    def _read(self, peer: PeerId, now: float) -> None:
        server = self._fleet.get(peer)
        if server is None or peer not in self._group_of:
            return
        pace = self._fleet.pace(peer)
        times = pace.times(server.hello.last - server.hello.first, now)
        self._groups[self._group_of[peer]].put(peer, times, pace.times_until(now))

    def _slow(self, name: Group, look: Look) -> list[PeerId]:
        """The slowest first. The fleet hears of all to whom it makes a difference."""
        group = self._groups[name]
        ratios = np.where(np.isnan(look.ratios), 1.0, look.ratios)
        counts = np.maximum(ratios, ALIKE)
        for row in np.flatnonzero(counts != group.told):
            if peer := group.peers[row]:
                self._fleet.compared(peer, float(ratios[row]))
        group.told = counts
        slow = np.flatnonzero(look.slow(SLOW, FAR))
        return [group.peers[row] for row in sorted(slow, key=lambda row: -look.ratios[row])]

    def _doubtful(self, looks: Mapping[Group, Look]) -> list[PeerId]:
        """Who has work of ours and does it much slower than it did; or, if it was never found well beside its like,
        than servers do that have other work."""
        found: list[PeerId] = []
        strange: list[Group] = []
        for name, look in looks.items():
            group = self._groups[name]
            found += group.of(group.vouch(look, look.slow(SLOW, FAR), SLOW))
            if any(self._fleet.hops[peer] for peer in group.of(group.strangers(look))):
                strange.append(name)
        for model, kind in dict.fromkeys(name[:2] for name in strange):
            names = [name for name in looks if name[:2] == (model, kind)]
            beside = side_by_side([self._groups[name] for name in names])
            for name, look in zip(names, beside, strict=True):
                group = self._groups[name]
                found += group.of(look.slow(SLOW, FAR) & group.strangers(looks[name]))
        return [peer for peer in dict.fromkeys(found) if self._fleet.hops[peer]]


def alike(hello: Hello) -> Group:
    """The same for servers whose steps can be compared."""
    return hello.model, kind_of(hello), hello.last - hello.first, hello.last == hello.n_blocks
