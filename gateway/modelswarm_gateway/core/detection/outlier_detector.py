"""Outlier detection: finds servers that run but are much slower than their peer group (gray failures).

`monitor.py` asks once a second; `peer_comparison.py` compares. Times per block of steps of equal size are compared.
Steps with longer contexts may take longer, by as much as they read more weights and KV.
A peer group does the same work: the same variant, as many blocks, with or without sampling. Only a comparison finds an
outlier: under overload all servers are equally slow, and none is found. Knows no sessions and moves none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.detection.peer_comparison import Comparison, PeerGroup, compare_groups
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.health import INSIGNIFICANT_RATIO
from modelswarm_gateway.core.servers.variant import ModelVariant, variant_of

# Ratio to the median of the peer group from which a server is an outlier.
MIN_RATIO = 5.0
# Threshold in median absolute deviations; holds while fewer than half of the samples are wrong.
MIN_DEVIATIONS = 6.0
# Number of changed servers that may wait for the next detection; of more, some are read at every tick.
MAX_BACKLOG = 128
# Number of changed servers that are read at a tick.
READS_PER_TICK = 128
# Number of consecutive comparisons, each with new steps, that must find a server slow.
CONSECUTIVE = 3

PeerGroupKey: TypeAlias = tuple[str, ModelVariant, int, bool]


@dataclass(frozen=True, slots=True)
class _Streak:
    """Consecutive comparisons that found a server slow."""

    count: int = 0
    last_rows: int = -1  # rows that the server had run at the last one

    def extended(self, rows: int) -> _Streak:
        """Return the streak with one comparison more, unless the server has run no new rows."""
        return self if rows == self.last_rows else _Streak(self.count + 1, rows)


class OutlierDetector:
    def __init__(self, registry: ServerRegistry) -> None:
        self._registry = registry
        self._groups: dict[PeerGroupKey, PeerGroup] = {}
        self._group_of: dict[PeerId, PeerGroupKey] = {}
        self._slow: dict[PeerId, _Streak] = {}  # of servers that are slow
        self._undecided: dict[PeerId, _Streak] = {}  # of servers that may be slow
        self._probed: dict[PeerId, PeerId] = {}  # server -> the replica that got its session
        self._backlog: set[PeerId] = set()  # servers with step times that are not read yet

    def add_server(self, peer: PeerId) -> None:
        self.remove_server(peer)
        server = self._registry.find_server(peer)
        assert server is not None, "only servers that are connected are compared"
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
        """Return the servers that are outliers from now on, the slowest first.

        Only servers whose blocks are held by others, even without all of those returned.
        """
        self._read_all(now)
        comparisons = {name: group.compare() for name, group in self._groups.items()}
        self._undecided = self._streaks(self._find_undecided(comparisons), self._undecided)
        slow = [
            peer
            for name, comparison in comparisons.items()
            for peer in self._report_slowness(name, comparison)
        ]
        self._slow = self._streaks(slow, self._slow)
        found: list[PeerId] = []
        for peer, streak in self._slow.items():
            if streak.count >= CONSECUTIVE and self._registry.can_spare(peer, now, found):
                found.append(peer)
        for peer in found:
            del self._slow[peer]
            self._probed.pop(peer, None)
        return found

    @property
    def undecided(self) -> list[PeerId]:
        """Servers that look slow and have no peer to be compared with."""
        return [peer for peer, streak in self._undecided.items() if streak.count >= CONSECUTIVE]

    def mark_probed(self, peer: PeerId, replica: PeerId) -> None:
        """A session of an undecided server runs on its replica from now on: the replica's steps are evidence, too."""
        self._probed[peer] = replica

    def _streaks(
        self, peers: Sequence[PeerId], before: Mapping[PeerId, _Streak]
    ) -> dict[PeerId, _Streak]:
        return {
            peer: before.get(peer, _Streak()).extended(self._evidence_rows(peer)) for peer in peers
        }

    def _evidence_rows(self, peer: PeerId) -> int:
        """Return a number that grows with every new evidence about a server."""
        health, replica = self._registry.health, self._probed.get(peer)
        rows = health.step_times(replica).rows_run if replica is not None else 0
        return health.step_times(peer).rows_run + rows

    def read_backlog(self, now: float) -> None:
        """Read some changed servers at every tick if they are many: `detect` would take long otherwise."""
        self._backlog |= self._registry.health.take_changed()
        for _ in range(min(READS_PER_TICK, len(self._backlog) - MAX_BACKLOG)):
            self._read_server(self._backlog.pop(), now)

    def _read_all(self, now: float) -> None:
        """Read the step times of servers that have reported new ones, or none for too long."""
        peers = self._backlog | self._registry.health.take_changed()
        self._backlog = set()
        for group in self._groups.values():
            peers.update(group.peers[row] for row in np.flatnonzero(group.fresh_until <= now))
        for peer in peers:
            self._read_server(peer, now)

    def _read_server(self, peer: PeerId, now: float) -> None:
        server = self._registry.find_server(peer)
        if server is None or peer not in self._group_of:
            return
        steps = self._registry.health.step_times(peer)
        costs = steps.per_block(server.hello.last - server.hello.first, now)
        self._groups[self._group_of[peer]].set_costs(peer, costs, steps.fresh_until(now))

    def _report_slowness(self, name: PeerGroupKey, comparison: Comparison) -> list[PeerId]:
        """Return the outliers of a group, the slowest first. Sets the slowness of servers whose score it changes."""
        group = self._groups[name]
        ratios = np.where(np.isnan(comparison.ratios), 1.0, comparison.ratios)
        counts = np.maximum(ratios, INSIGNIFICANT_RATIO)
        for row in np.flatnonzero(counts != group.reported):
            if peer := group.peers[row]:
                self._registry.set_slowness(peer, float(ratios[row]))
        group.reported = counts
        slow = np.flatnonzero(comparison.outliers(MIN_RATIO, MIN_DEVIATIONS))
        slowest_first = sorted(slow, key=lambda row: -comparison.ratios[row])
        return [group.peers[row] for row in slowest_first]

    def _find_undecided(self, comparisons: Mapping[PeerGroupKey, Comparison]) -> list[PeerId]:
        """Return servers with hops of this gateway that look slow and have no peer.

        Such a server is much slower than its own baseline. If it was never found healthy in its peer group, it is
        compared with servers of the same variant that do other work.
        """
        found: list[PeerId] = []
        unknown: list[PeerGroupKey] = []
        for name, comparison in comparisons.items():
            group = self._groups[name]
            outliers = comparison.outliers(MIN_RATIO, MIN_DEVIATIONS)
            found += group.peers_at(group.compare_with_baseline(comparison, outliers, MIN_RATIO))
            never_compared = group.peers_at(group.never_compared(comparison))
            if any(self._registry.hops[peer] for peer in never_compared):
                unknown.append(name)
        for model, variant in dict.fromkeys(name[:2] for name in unknown):
            names = [name for name in comparisons if name[:2] == (model, variant)]
            across = compare_groups([self._groups[name] for name in names])
            for name, comparison in zip(names, across, strict=True):
                group = self._groups[name]
                outliers = comparison.outliers(MIN_RATIO, MIN_DEVIATIONS)
                found += group.peers_at(outliers & group.never_compared(comparisons[name]))
        return [peer for peer in dict.fromkeys(found) if self._registry.hops[peer]]


def group_key(hello: Hello) -> PeerGroupKey:
    """Return a key that is equal for servers whose steps can be compared."""
    return hello.model, variant_of(hello), hello.last - hello.first, hello.last == hello.n_blocks
