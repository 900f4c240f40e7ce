"""Cheapest paths over thousands of servers: choose the servers that carry a session's blocks.

Pure. `cost_table.py` adds the columns that costs are computed from, and `cost_model.py` sets the costs. Knows no
sessions, no health and no load.

Backward dynamic programming over (block boundary, zone). `cost_to_go[b][z]` is the least cost of the rest of the route
once the rows of boundary b are in zone z. A hop uses a server from where the route enters it to the server's end, so
spans may overlap and routes may enter mid-span. The cost between two servers is the delay between their zones, so no
array grows with the square of the number of servers. Going forward, each hop is sampled by a softmax over cost-to-go:
gateways with the same knowledge do not all take the same server. All costs are milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from modelswarm.protocol.identity import PeerId

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

# Cost in ms of a hop that may be taken only where no other server holds the block.
LAST_RESORT = 1e9
# Temperature of the softmax, as a share of the best cost-to-go.
TEMPERATURE = 0.08
# Number of best servers that a hop is sampled from; servers tied with the last of them are added.
SAMPLED_SERVERS = 4
# Share of the last sampled server's weight from which another server counts as tied with it.
TIE_SHARE = 0.9
# Weight, relative to the best server's, below which a server is never sampled.
MIN_WEIGHT = 1e-9
# Cost of a path that does not exist.
UNREACHABLE = float("inf")
# A growing table gets one spare row per this many rows.
ROWS_PER_SPARE = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server that may become a hop: its span and its zone."""

    peer: PeerId
    first: int
    last: int
    zone: str = ""  # "": not known


@dataclass(frozen=True, slots=True)
class RouteHop:
    """One chosen hop, and the alternatives it was chosen from."""

    peer: PeerId
    first: int
    last: int
    cost_to_go_ms: float = 0.0  # from here to the end of the gap, by this server
    best_ms: float = 0.0  # the same by the best server
    best_peer: PeerId = ""
    options: int = 1  # servers that could have been taken here


@dataclass(frozen=True, slots=True)
class _Holders:
    """The rows of the servers that hold one block, ordered by zone; `starts` has the first index of each zone."""

    rows: Rows
    starts: Rows
    zones: Rows


class PathTable:
    """Servers of one variant as a structure of arrays: one row per server, changed in place.

    Adding or removing a server costs time proportional to its blocks, not to the number of servers. The rows that hold
    a block are ordered by zone, and within a zone by arrival. Row numbers have no meaning: the row of a removed server
    is reused. A subclass that adds columns extends `_append_rows`.
    """

    def __init__(
        self, candidates: Sequence[Candidate], n_blocks: int, delay_ms: Callable[[str, str], float]
    ) -> None:
        self.n_blocks = n_blocks
        self.zones = {
            name: index for index, name in enumerate(sorted({c.zone for c in candidates}))
        }
        self.peers: list[PeerId] = []  # by row; of a free row: any
        self.row_of: dict[PeerId, int] = {}
        self.first, self.last, self.zone = (np.zeros(0, dtype=np.intp) for _ in range(3))
        self.hop_ms: Floats = np.zeros(0)  # once for every hop on the server
        self.block_ms: Floats = np.zeros(0)  # for every block used
        self._free: list[int] = []  # rows without a server
        none = np.zeros(0, dtype=np.intp)
        self._holders = [_Holders(none, none, none) for _ in range(n_blocks)]
        self._ending = [none for _ in range(n_blocks + 1)]  # rows by the end of their span
        self.set_delays(delay_ms)
        self.add_candidates(candidates)

    def set_delays(self, delay_ms: Callable[[str, str], float]) -> None:
        """Read the delays between the zones again."""
        self.delays = np.array(
            [[delay_ms(a, b) for b in self.zones] for a in self.zones], dtype=np.float64
        )

    # ---- rows

    def remove_peers(self, peers: Iterable[PeerId]) -> list[int]:
        """Remove these servers. Returns the rows that are free now."""
        rows = [self.row_of.pop(peer) for peer in peers]
        gone = np.zeros(len(self.peers), dtype=np.bool_)
        gone[rows] = True
        for block in {block for row in rows for block in range(self.first[row], self.last[row])}:
            held = self._holders[block].rows
            self._holders[block] = self._by_zone(held[~gone[held]])
        for edge in {int(self.last[row]) for row in rows}:
            ending = self._ending[edge]
            self._ending[edge] = ending[~gone[ending]]
        self.first[rows] = self.last[rows] = 0
        self._free += rows
        return rows

    def add_candidates(self, candidates: Sequence[Candidate]) -> list[int]:
        """Add these servers, whose zones must be known. Returns their rows, which have no costs yet."""
        self._grow(len(candidates) - len(self._free))
        taken = [self._free.pop() for _ in candidates]
        for row, each in zip(taken, candidates, strict=True):
            self.peers[row], self.row_of[each.peer] = each.peer, row
        rows = np.array(taken, dtype=np.intp)
        first = np.array([each.first for each in candidates], dtype=np.intp)
        last = np.array([each.last for each in candidates], dtype=np.intp)
        self.first[rows], self.last[rows] = first, last
        self.zone[rows] = [self.zones[each.zone] for each in candidates]
        self.hop_ms[rows], self.block_ms[rows] = 0.0, 1.0
        for block in range(first.min(initial=self.n_blocks), last.max(initial=0)):
            new = rows[(first <= block) & (block < last)]
            if new.size:
                held = np.append(self._holders[block].rows, new)
                self._holders[block] = self._by_zone(held[self.zone[held].argsort(kind="stable")])
        for edge in set(last.tolist()):
            self._ending[edge] = np.append(self._ending[edge], rows[last == edge])
        return taken

    def _grow(self, missing: int) -> None:
        """Add at least the missing rows, and some spare ones: adding many takes as long as adding one."""
        if missing <= 0:
            return
        count = len(self.peers)
        more = max(missing, count // ROWS_PER_SPARE)
        self._free += reversed(range(count, count + more))
        self.peers += [""] * more
        self._append_rows(more)

    def _append_rows(self, count: int) -> None:
        """Make every column longer by so many rows."""
        self.first, self.last, self.zone = (
            np.append(column, np.zeros(count, dtype=np.intp))
            for column in (self.first, self.last, self.zone)
        )
        self.hop_ms = np.append(self.hop_ms, np.zeros(count))
        self.block_ms = np.append(self.block_ms, np.ones(count))

    def _by_zone(self, rows: Rows) -> _Holders:
        zone = self.zone[rows]
        starts = np.flatnonzero(np.diff(zone, prepend=-1))
        return _Holders(rows, starts, zone[starts])

    # ---- paths

    def cost_to_go(
        self, blocks: tuple[int, int], hop_ms: Floats, after: str | None = None
    ) -> Floats:
        """Return the least cost from every boundary of `blocks` to their end, by the zone the rows come from.

        Infinite where no server continues. `after`: the zone of the hop that follows.
        """
        first, end = blocks
        to_go = np.full((end - first + 1, len(self.zones)), UNREACHABLE)
        to_go[-1] = 0.0 if after is None else self.delays[:, self.zones[after]]
        whole = np.zeros(len(self.peers))  # cost through a server, had it been entered at block 0
        for block in range(end - 1, first - 1, -1):
            edge = block + 1
            ending = self._ending[edge]
            if edge == end:  # a server that holds more is left here
                ending = np.flatnonzero((self.last >= end) & (self.first < end))
            then = to_go[edge - first]
            whole[ending] = hop_ms[ending] + self.block_ms[ending] * edge + then[self.zone[ending]]
            at = self._holders[block]
            if at.rows.size:
                entered = whole[at.rows] - self.block_ms[at.rows] * block
                by_zone = np.minimum.reduceat(entered, at.starts)
                to_go[block - first] = (self.delays[:, at.zones] + by_zone).min(axis=1)
        return to_go

    def sample_path(
        self,
        blocks: tuple[int, int],
        cost_to_go: Floats,
        hop_ms: Floats,
        before: str | None = None,
        draw: Callable[[], float] | None = None,
    ) -> list[RouteHop] | None:
        """Return a chain of servers over `blocks`, sampled near the cheapest; without `draw` the cheapest.

        None if there is no chain. `cost_to_go` may be a little older than the costs. `before`: the zone of the hop in
        front. `draw` returns a number in [0, 1).
        """
        first, end = blocks
        hops: list[RouteHop] = []
        block, zone = first, None if before is None else self.zones[before]
        while block < end:
            rows = self._holders[block].rows
            edges = np.minimum(self.last[rows], end)
            costs = hop_ms[rows] + self.block_ms[rows] * (edges - block)
            costs += cost_to_go[edges - first, self.zone[rows]]
            if zone is not None:
                costs += self.delays[zone, self.zone[rows]]
            if not rows.size or not np.isfinite(costs.min()):
                return None
            pick, best = sample_softmax(costs, draw), int(costs.argmin())
            peer, edge = self.peers[rows[pick]], int(edges[pick])
            options = int(np.isfinite(costs).sum())
            choice = (float(costs[pick]), float(costs[best]), self.peers[rows[best]], options)
            hops.append(RouteHop(peer, block, edge, *choice))
            block, zone = edge, int(self.zone[rows[pick]])
        return hops

    def path_cost(self, route: Sequence[tuple[PeerId, int, int]]) -> float:
        """Return the cost of a whole route of (peer, first, last); infinite if a server is not in the table."""
        if any(peer not in self.row_of for peer, _, _ in route):
            return UNREACHABLE
        rows = [self.row_of[peer] for peer, _, _ in route]
        used = sum(
            float(self.hop_ms[row] + self.block_ms[row] * (last - first))
            for row, (_, first, last) in zip(rows, route, strict=True)
        )
        zones = [int(self.zone[row]) for row in rows]
        return used + sum(float(self.delays[a, b]) for a, b in itertools.pairwise(zones))


def sample_softmax(costs: Floats, draw: Callable[[], float] | None) -> int:
    """Return the index of one of `costs`: sampled by a softmax, or the least one without `draw`.

    The temperature is TEMPERATURE of the best cost. Only the best few servers and their ties are sampled: together,
    thousands that are slightly worse would outweigh them. Last resorts raise all costs alike, so they do not count in
    the temperature.
    """
    cheapest = int(costs.argmin())
    if draw is None:
        return cheapest
    best = float(costs[cheapest])
    temperature = max(TEMPERATURE * (best % LAST_RESORT), 1e-9)
    weights = np.exp((best - costs) / temperature)
    if costs.size > SAMPLED_SERVERS:
        last = np.partition(weights, -SAMPLED_SERVERS)[-SAMPLED_SERVERS]
        weights[weights < TIE_SHARE * last] = 0.0
    weights[weights < MIN_WEIGHT] = 0.0
    sums = weights.cumsum()
    return int(np.searchsorted(sums, draw() * sums[-1], side="right"))
