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
from modelswarm_gateway.core.detection.peer_comparison import PeerGroup, Comparison, compare_groups
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.health import INSIGNIFICANT_RATIO
from modelswarm_gateway.core.servers.variant import ModelVariant, variant_of

MIN_RATIO = 5.0  # times its like's median, and ...
MIN_DEVIATIONS = 6.0  # deviations from it, by the median of deviations, which half of them cannot falsify
MAX_BACKLOG = 128  # news that may wait for a look; of more ...
READS_PER_TICK = 128  # ... so many are read at a tick
CONSECUTIVE = 3  # in a row that find a server slow, each by something new

PeerGroupKey: TypeAlias = tuple[str, ModelVariant, int, bool]


@dataclass(frozen=True, slots=True)
class _Streak:
    """That found a server slow."""

    count: int = 0
    last_rows: int = -1  # that had been run by the last one

    def extended(self, rows: int) -> _Streak:
        """What has been looked at before says nothing more."""
        return self if rows == self.last_rows else _Streak(self.count + 1, rows)


class OutlierDetector:
    def __init__(self, registry: ServerRegistry) -> None:
        self._registry = registry
        self._groups: dict[PeerGroupKey, PeerGroup] = {}
        self._group_of: dict[PeerId, PeerGroupKey] = {}
        self._slow: dict[PeerId, _Streak] = {}  # of those that are slow, ...
        self._undecided: dict[PeerId, _Streak] = {}  # ... and of those that may be
        self._probed: dict[PeerId, PeerId] = {}
        self._backlog: set[PeerId] = set()  # who has said something new

    def add_server(self, peer: PeerId) -> None:
        self.remove_server(peer)
        server = self._registry.get(peer)
        assert server is not None, "only servers that are linked are compared"
        name = self._group_of[peer] = group_key(server.hello)
        self._groups.setdefault(name, PeerGroup()).add_peer(peer)

    def remove_server(self, peer: PeerId) -> None:
        name = self._group_of.pop(peer, None)
        if name is None:
            return
        for each in (self._slow, self._undecided, self._probed):
            each.pop(peer, None)
        self._groups[name].remove_peer(peer)
        if not self._groups[name]:
            del self._groups[name]

    def detect(self, now: float) -> list[PeerId]:
        """Who is slow from now on, and can be done without: all of them together, the slowest first."""
        self._read_all(now)
        looks = {name: group.compare() for name, group in self._groups.items()}
        self._undecided = self._streaks(self._find_undecided(looks), self._undecided)
        slow = [peer for name, look in looks.items() for peer in self._report_slowness(name, look)]
        self._slow = self._streaks(slow, self._slow)
        found: list[PeerId] = []
        for peer, seen in self._slow.items():
            if seen.count >= CONSECUTIVE and self._registry.can_spare(peer, now, found):
                found.append(peer)
        for peer in found:
            del self._slow[peer]
            self._probed.pop(peer, None)
        return found

    @property
    def undecided(self) -> list[PeerId]:
        """Who looks slow, and has nobody to be compared with."""
        return [peer for peer, seen in self._undecided.items() if seen.count >= CONSECUTIVE]

    def mark_probed(self, peer: PeerId, replica: PeerId) -> None:
        """A session of a doubtful one runs on its equal from now on: what that does says something of both."""
        self._probed[peer] = replica

    def _streaks(
        self, peers: Sequence[PeerId], before: Mapping[PeerId, _Streak]
    ) -> dict[PeerId, _Streak]:
        return {peer: before.get(peer, _Streak()).extended(self._evidence_rows(peer)) for peer in peers}

    def _evidence_rows(self, peer: PeerId) -> int:
        """What grows with all that is new about it."""
        equal = self._probed.get(peer)
        rows = self._registry.health.step_times(equal).rows_run if equal is not None else 0
        return self._registry.health.step_times(peer).rows_run + rows

    def read_backlog(self, now: float) -> None:
        """At every tick: of very many news not all are left for the next look, which would take long."""
        self._backlog |= self._registry.health.take_changed()
        for _ in range(min(READS_PER_TICK, len(self._backlog) - MAX_BACKLOG)):
            self._read_server(self._backlog.pop(), now)

    def _read_all(self, now: float) -> None:
        """The times of those that have said something new, or nothing for too long."""
        peers = self._backlog | self._registry.health.take_changed()
        self._backlog = set()
        for group in self._groups.values():
            peers.update(group.peers[row] for row in np.flatnonzero(group.fresh_until <= now))
        for peer in peers:
            self._read_server(peer, now)

    def _read_server(self, peer: PeerId, now: float) -> None:
        server = self._registry.get(peer)
        if server is None or peer not in self._group_of:
            return
        pace = self._registry.health.step_times(peer)
        times = pace.per_block(server.hello.last - server.hello.first, now)
        self._groups[self._group_of[peer]].set_times(peer, times, pace.fresh_until(now))

    def _report_slowness(self, name: PeerGroupKey, look: Comparison) -> list[PeerId]:
        """The slowest first. The registry hears of all to whom it makes a difference."""
        group = self._groups[name]
        ratios = np.where(np.isnan(look.ratios), 1.0, look.ratios)
        counts = np.maximum(ratios, INSIGNIFICANT_RATIO)
        for row in np.flatnonzero(counts != group.reported):
            if peer := group.peers[row]:
                self._registry.set_slowness(peer, float(ratios[row]))
        group.reported = counts
        slow = np.flatnonzero(look.outliers(MIN_RATIO, MIN_DEVIATIONS))
        return [group.peers[row] for row in sorted(slow, key=lambda row: -look.ratios[row])]

    def _find_undecided(self, looks: Mapping[PeerGroupKey, Comparison]) -> list[PeerId]:
        """Who has work of ours and does it much slower than it did; or, if it was never found well beside its like,
        than servers do that have other work."""
        found: list[PeerId] = []
        strange: list[PeerGroupKey] = []
        for name, look in looks.items():
            group = self._groups[name]
            found += group.peers_at(group.compare_with_baseline(look, look.outliers(MIN_RATIO, MIN_DEVIATIONS), MIN_RATIO))
            if any(self._registry.hops[peer] for peer in group.peers_at(group.never_compared(look))):
                strange.append(name)
        for model, kind in dict.fromkeys(name[:2] for name in strange):
            names = [name for name in looks if name[:2] == (model, kind)]
            beside = compare_groups([self._groups[name] for name in names])
            for name, look in zip(names, beside, strict=True):
                group = self._groups[name]
                found += group.peers_at(look.outliers(MIN_RATIO, MIN_DEVIATIONS) & group.never_compared(looks[name]))
        return [peer for peer in dict.fromkeys(found) if self._registry.hops[peer]]


def group_key(hello: Hello) -> PeerGroupKey:
    """The same for servers whose steps can be compared."""
    return hello.model, variant_of(hello), hello.last - hello.first, hello.last == hello.n_blocks
