"""What servers of one kind cost, in columns: one row for each, changed in place as beats come and links come and go.

Kept by `pricing.py`, which says what a server costs; routes are chosen from its table (`routing.py`). Rows of servers
that are gone stay behind, empty, for those that come: a link up or down costs what its blocks do, and no walk over all
servers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.routing.path_search import LAST_RESORT, Candidate, Floats, Table
from modelswarm_gateway.core.routing.zones import Zones
from modelswarm_gateway.core.servers.server import UNKNOWN_BLOCK_MS, Server

SWEPT = 32  # servers priced again at every choice, in turn
LEAST_USUAL_MS = 0.001  # of a block


class Book:
    def __init__(self, servers: Sequence[Server], zones: Zones) -> None:
        """At least one server. Nothing is priced yet, but what is usual among them is known."""
        self._zones = zones
        self._zone_changes = zones.changes
        candidates = [_candidate(server) for server in servers]
        self.table = Table(candidates, servers[0].hello.n_blocks, zones.delay)
        by_peer = {server.hello.peer: server for server in servers}
        self.servers: list[Server | None] = [by_peer[peer] for peer in self.table.peers]
        count = len(self.servers)
        self.raw_ms = np.full(count, math.nan)  # measured block times; NaN: none
        self.free = np.zeros(count)  # pages
        self.total = np.zeros(count)
        self.page = np.zeros(count)
        self.longest = np.full(count, math.inf)
        self.resort = np.zeros(count)  # LAST_RESORT or 0
        self.score = np.ones(count)  # health
        for row, server in enumerate(self.servers):
            self._enter(row, server)
        self.usual_ms = self._usual()
        self.stale = True  # prices have changed since costs-to-go were computed
        self.urgent = True
        self.priced_at = -math.inf
        self.kept: dict[object, Floats] = {}  # costs-to-go, by what was asked
        self._next_row = 0
        self._gone: set[PeerId] = set()
        self._come: dict[PeerId, Server] = {}

    # ---- who is in it

    def left(self, peer: PeerId) -> None:
        if self._come.pop(peer, None) is None:
            self._gone.add(peer)

    def joined(self, server: Server) -> None:
        self._come[server.hello.peer] = server

    def follow(self) -> list[int] | None:
        """Take in who went and came since: the rows of those that came, to be priced. None: a new book is needed."""
        if not (self._gone or self._come):
            return []
        gone, come = self._gone, list(self._come.values())
        self._gone, self._come = set(), {}
        table = self.table
        if any(server.hello.zone not in table.zones for server in come):
            return None
        if 2 * (len(table.row) - len(gone) + len(come)) < len(table.peers):
            return None  # most rows would be empty
        for row in table.leave(gone):
            self._enter(row, None)
        rows = table.join([_candidate(server) for server in come])
        self._grow(len(table.peers))
        for row, server in zip(rows, come, strict=True):
            self._enter(row, server)
        self.urgent = True
        return rows

    def _grow(self, count: int) -> None:
        more = count - len(self.servers)
        if not more:
            return
        self.servers += [None] * more
        self.raw_ms = np.append(self.raw_ms, np.full(more, math.nan))
        self.free = np.append(self.free, np.zeros(more))
        self.total = np.append(self.total, np.zeros(more))
        self.page = np.append(self.page, np.zeros(more))
        self.longest = np.append(self.longest, np.full(more, math.inf))
        self.resort = np.append(self.resort, np.zeros(more))
        self.score = np.append(self.score, np.ones(more))

    def _enter(self, row: int, server: Server | None) -> None:
        """What a row says before it is priced; of an empty one nothing, so that it counts nowhere."""
        self.servers[row] = server
        self.resort[row], self.score[row] = 0.0, 1.0
        if server is None:
            self.raw_ms[row], self.longest[row] = math.nan, math.inf
            self.free[row] = self.total[row] = self.page[row] = 0.0
            return
        hello = server.hello
        self.raw_ms[row], self.free[row] = _or_nan(server.measured_block_ms), server.free_pages
        self.total[row], self.page[row] = hello.total_pages, hello.page_size
        self.longest[row] = hello.max_length

    # ---- what it says

    def due(self, marked: Iterable[PeerId]) -> set[int]:
        """The rows of servers to be priced again: those that were marked, and some more in turn."""
        rows = {self.table.row[peer] for peer in marked}
        count, swept = len(self.servers), 0
        for _ in range(count):
            if swept == SWEPT:
                break
            row, self._next_row = self._next_row, (self._next_row + 1) % count
            if self.servers[row] is not None:
                swept += 1
                rows.add(row)
        return rows

    def filled(self, rows: Iterable[int]) -> Iterator[tuple[int, Server]]:
        for row in rows:
            server = self.servers[row]
            if server is not None:
                yield row, server

    def put(
        self, row: int, hop_ms: float, block_ms: float, score: float, *, last_resort: bool
    ) -> None:
        """A server costs so much from now on; what else a choice asks of it is looked up."""
        server, table = self.servers[row], self.table
        assert server is not None, "only servers that are linked are priced"
        resort = LAST_RESORT if last_resort else 0.0
        new = hop_ms + resort, block_ms, score, server.free_pages
        old = table.hop_ms[row], table.block_ms[row], self.score[row], self.free[row]
        if resort != self.resort[row]:
            self.resort[row] = resort
            self.urgent = True
        elif new != old:
            self.stale = True
        table.hop_ms[row], table.block_ms[row], self.score[row], self.free[row] = new
        self.raw_ms[row] = _or_nan(server.measured_block_ms)

    @property
    def outdated(self) -> bool:
        """Whether costs-to-go would come out differently now."""
        return self.stale or self._zone_changes != self._zones.changes

    def settle(self, now: float) -> None:
        """New costs-to-go from here on."""
        self.kept.clear()
        self.priced_at, self.stale, self.urgent = now, False, False
        self.usual_ms = self._usual()
        if self._zone_changes != self._zones.changes:
            self._zone_changes = self._zones.changes
            self.table.measure(self._zones.delay)

    def _usual(self) -> float:
        known = self.raw_ms[~np.isnan(self.raw_ms)]
        middle = known.size // 2
        # np.median would import numpy.ma: a quarter of a second without a token
        usual = float(np.partition(known, middle)[middle]) if known.size else UNKNOWN_BLOCK_MS
        return max(LEAST_USUAL_MS, usual)


def _candidate(server: Server) -> Candidate:
    hello = server.hello
    return Candidate(hello.peer, hello.first, hello.last, hello.zone)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
