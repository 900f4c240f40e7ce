"""Servers that are alive and much slower than their like: gray failures, found by comparison only.

`detection.py` asks once a second; `alike.py` compares. Compared are the times per block of steps of the same size,
among servers that do the same work: as many blocks of the same kind, with or without the picking of tokens. In an
overload all are equally slow, and nobody is found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.alike import Alike
from modelswarm_gateway.core.fleet import Fleet
from modelswarm_gateway.core.health import ALIKE
from modelswarm_gateway.core.kinds import Kind, kind_of

SLOW = 5.0  # times its like's median, and ...
FAR = 6.0  # deviations from it, by the median of deviations, which half of them cannot falsify
MOST_UNREAD = 128  # news that may wait for a look; of more ...
MOST_READ = 128  # ... so many are read at a tick
LOOKS = 3  # in a row that find a server slow, each by something new


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
        self._groups: dict[object, Alike] = {}
        self._group_of: dict[PeerId, object] = {}
        self._looks: dict[PeerId, _Looks] = {}
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
        self._looks.pop(peer, None)
        self._groups[name].remove(peer)
        if not self._groups[name]:
            del self._groups[name]

    def find(self, now: float) -> list[PeerId]:
        """Who is slow from now on, and can be done without: all of them together, the slowest first."""
        self._read_all(now)
        before, self._looks = self._looks, {}
        found: list[PeerId] = []
        for group in self._groups.values():
            for peer in self._slow(group):
                looks = before.get(peer, _Looks()).next(self._fleet.pace(peer).rows)
                self._looks[peer] = looks
                if looks.count >= LOOKS and self._fleet.spare(peer, now, found):
                    found.append(peer)
        for peer in found:
            del self._looks[peer]
        return found

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

    def _slow(self, group: Alike) -> list[PeerId]:
        """The slowest first. The fleet hears of all to whom it makes a difference."""
        look = group.look()
        ratios = np.where(np.isnan(look.ratios), 1.0, look.ratios)
        counts = np.maximum(ratios, ALIKE)
        for row in np.flatnonzero(counts != group.told):
            if peer := group.peers[row]:
                self._fleet.compared(peer, float(ratios[row]))
        group.told = counts
        slow = np.flatnonzero((look.ratios >= SLOW) & (look.deviations >= FAR))
        return [group.peers[row] for row in sorted(slow, key=lambda row: -look.ratios[row])]


def alike(hello: Hello) -> tuple[str, Kind, int, bool]:
    """The same for servers whose steps can be compared."""
    return hello.model, kind_of(hello), hello.last - hello.first, hello.last == hello.n_blocks
