"""Which servers carry a session's blocks: cheapest paths over thousands of servers. Pure; `pricing.py` sets the prices.

Backward dynamic programming over (block boundary, zone): `to_go[b][z]` is the least cost of what is left once the rows
of boundary b are in zone z. A hop uses a server from where the route enters it to the server's end, so spans may
overlap and routes may enter mid-span. What lies between two servers is the delay between their zones, so nothing is as
large as the square of the servers. Going forward, each hop is drawn by a softmax over cost-to-go, so that several
gateways with the same knowledge do not all take the same server. All costs are milliseconds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from modelswarm.protocol.identity import PeerId

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

LAST_RESORT = 1e9  # what a hop costs that is to be taken only where there is no other
TEMPERATURE = 0.08  # temperature of the draw, as a share of the best cost-to-go
SAMPLED_SERVERS = 4  # servers, and those that are as good as the last of them
TIE_SHARE = 0.9  # ... which is so much of its weight
MIN_WEIGHT = 1e-9  # a server with less, of the best one's weight, is never drawn
UNREACHABLE = float("inf")
ROWS_PER_SPARE = 16  # one row of so many is made beforehand, for servers that will come


@dataclass(frozen=True, slots=True)
class Candidate:
    peer: PeerId
    first: int
    last: int
    zone: str = ""  # "": not known


@dataclass(frozen=True, slots=True)
class RouteHop:
    """One hop that was chosen, and against what."""

    peer: PeerId
    first: int
    last: int
    cost_to_go_ms: float = 0.0  # from here to the end of the gap, by this server
    best_ms: float = 0.0  # ... by the best one
    best_peer: PeerId = ""
    options: int = 1  # servers that could have been taken here


@dataclass(frozen=True, slots=True)
class _Holders:
    """The rows of the table that hold one block, and where in them each zone begins."""

    rows: Rows
    starts: Rows
    zones: Rows


class PathTable:
    """Servers of one kind in columns: prices are changed in place, and servers go and come for what their blocks cost.

    The rows that hold a block are in the order of their zones, and in each as the servers came; the numbers of rows
    mean nothing, and those of servers that are gone are given to others.
    """

    def __init__(
        self, candidates: Sequence[Candidate], n_blocks: int, delay: Callable[[str, str], float]
    ) -> None:
        names = sorted({c.zone for c in candidates})
        number = {name: index for index, name in enumerate(names)}
        held = sorted(candidates, key=lambda c: number[c.zone])  # stable
        self.n_blocks = n_blocks
        self.peers = [c.peer for c in held]
        self.row_of = {peer: row for row, peer in enumerate(self.peers)}
        self.first = np.array([c.first for c in held], dtype=np.intp)
        self.last = np.array([c.last for c in held], dtype=np.intp)
        self.zone = np.array([number[c.zone] for c in held], dtype=np.intp)
        self.zones = number
        self.set_delays(delay)
        self.hop_ms = np.zeros(len(held))  # once for every hop there
        self.block_ms = np.ones(len(held))  # for every block used
        self._holders = [
            self._zoned(np.flatnonzero((self.first <= block) & (self.last > block)))
            for block in range(n_blocks)
        ]
        self._ending = [np.flatnonzero(self.last == edge) for edge in range(n_blocks + 1)]
        self._free: list[int] = []  # rows of nobody

    def set_delays(self, delay: Callable[[str, str], float]) -> None:
        """Take the delays between zones again."""
        self.delays = np.array(
            [[delay(a, b) for b in self.zones] for a in self.zones], dtype=np.float64
        )

    # ---- who is in it

    def remove_servers(self, peers: Iterable[PeerId]) -> list[int]:
        """These are gone; the rows that are nobody's now."""
        rows = [self.row_of.pop(peer) for peer in peers]
        gone = np.zeros(len(self.peers), dtype=np.bool_)
        gone[rows] = True
        for block in {block for row in rows for block in range(self.first[row], self.last[row])}:
            held = self._holders[block].rows
            self._holders[block] = self._zoned(held[~gone[held]])
        for edge in {int(self.last[row]) for row in rows}:
            ending = self._ending[edge]
            self._ending[edge] = ending[~gone[ending]]
        self.first[rows] = self.last[rows] = 0
        self._free += rows
        return rows

    def add_servers(self, candidates: Sequence[Candidate]) -> list[int]:
        """These have come, of zones that are known; their rows, which cost nothing yet."""
        self._grow(len(candidates) - len(self._free))
        rows = [self._free.pop() for _ in candidates]
        holding: defaultdict[int, list[int]] = defaultdict(list)
        ending: defaultdict[int, list[int]] = defaultdict(list)
        for row, each in zip(rows, candidates, strict=True):
            self.peers[row], self.row_of[each.peer] = each.peer, row
            self.first[row], self.last[row] = each.first, each.last
            self.zone[row] = self.zones[each.zone]
            self.hop_ms[row], self.block_ms[row] = 0.0, 1.0
            ending[each.last].append(row)
            for block in range(each.first, each.last):
                holding[block].append(row)
        for block, new in holding.items():
            held = np.append(self._holders[block].rows, np.array(new, dtype=np.intp))
            self._holders[block] = self._zoned(held[self.zone[held].argsort(kind="stable")])
        for edge, new in ending.items():
            self._ending[edge] = np.append(self._ending[edge], np.array(new, dtype=np.intp))
        return rows

    def _grow(self, short: int) -> None:
        """By more rows than there are too few: it takes as long for many."""
        if short <= 0:
            return
        count = len(self.peers)
        more = max(short, count // ROWS_PER_SPARE)
        self._free += reversed(range(count, count + more))
        self.peers += [""] * more
        self.first, self.last, self.zone = (
            np.append(column, np.zeros(more, dtype=np.intp))
            for column in (self.first, self.last, self.zone)
        )
        self.hop_ms = np.append(self.hop_ms, np.zeros(more))
        self.block_ms = np.append(self.block_ms, np.ones(more))

    def _zoned(self, rows: Rows) -> _Holders:
        zone = self.zone[rows]
        starts = np.flatnonzero(np.diff(zone, prepend=-1))
        return _Holders(rows, starts, zone[starts])

    def holders(self, block: int) -> Rows:
        return self._holders[block].rows

    # ---- routes

    def cost_to_go(self, blocks: tuple[int, int], hop_ms: Floats, after: str | None = None) -> Floats:
        """Least cost from every boundary of `blocks` to their end, by the zone that the rows come from; infinite where
        no server goes on. `after`: the zone of the hop that follows."""
        first, end = blocks
        to_go = np.full((end - first + 1, len(self.zones)), UNREACHABLE)
        to_go[-1] = 0.0 if after is None else self.delays[:, self.zones[after]]
        whole = np.zeros(len(self.peers))  # cost through a server, had it been entered at block 0
        for block in range(end - 1, first - 1, -1):
            edge = block + 1
            ending = self._ending[edge]
            if edge == end:  # whatever goes on beyond it is left there
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
        """A chain of servers over `blocks`, drawn near the cheapest; without `draw` the cheapest. None: there is none.

        `to_go` may be a little older than the prices. `before`: the zone of the hop in front; `draw`: in [0, 1).
        """
        first, end = blocks
        legs: list[RouteHop] = []
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
            said = (float(costs[pick]), float(costs[best]), self.peers[rows[best]], options)
            legs.append(RouteHop(peer, block, edge, *said))
            block, zone = edge, int(self.zone[rows[pick]])
        return legs

    def path_cost(self, route: Sequence[tuple[PeerId, int, int]]) -> float:
        """What a whole route costs at these prices, whoever chose it; infinite if a server is not in the table."""
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
    """The index of one of `costs`: softmax with a temperature of SPREAD of the best, or the best itself.

    Of many only the best few and their equals: thousands that are a little worse would outweigh them together. Last
    resorts make all costs large alike: they do not count in the temperature.
    """
    cheapest = int(costs.argmin())
    if draw is None:
        return cheapest
    best = float(costs[cheapest])
    temperature = max(TEMPERATURE * (best % LAST_RESORT), 1e-9)
    weights = np.exp((best - costs) / temperature)
    if costs.size > SAMPLED_SERVERS:
        weights[weights < TIE_SHARE * np.partition(weights, -SAMPLED_SERVERS)[-SAMPLED_SERVERS]] = 0.0
    weights[weights < MIN_WEIGHT] = 0.0
    sums = weights.cumsum()
    pick = int(np.searchsorted(sums, draw() * sums[-1], side="right"))
    return pick if pick < costs.size and weights[pick] else cheapest
