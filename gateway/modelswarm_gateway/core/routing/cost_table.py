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
from modelswarm_gateway.core.routing.path_search import LAST_RESORT, Candidate, Floats, PathTable
from modelswarm_gateway.core.routing.zones import ZoneDelays
from modelswarm_gateway.core.servers.server import DEFAULT_BLOCK_MS, Server

UPDATES_PER_CHOICE = 32  # servers priced again at every choice, in turn
MIN_BLOCK_MS = 0.001  # of a block


class CostTable:
    def __init__(self, servers: Sequence[Server], zones: ZoneDelays) -> None:
        """At least one server. Nothing is priced yet, but what is usual among them is known."""
        self._zones = zones
        self._zone_version = zones.version
        candidates = [_candidate(server) for server in servers]
        self.table = PathTable(candidates, servers[0].hello.n_blocks, zones.delay_ms)
        by_peer = {server.hello.peer: server for server in servers}
        self.servers: list[Server | None] = [by_peer[peer] for peer in self.table.peers]
        count = len(self.servers)
        self.measured_ms = np.full(count, math.nan)  # measured block times; NaN: none
        self.free_pages = np.zeros(count)  # pages
        self.total_pages = np.zeros(count)
        self.page_size = np.zeros(count)
        self.max_length = np.full(count, math.inf)
        self.last_resort_ms = np.zeros(count)  # LAST_RESORT or 0
        self.score = np.ones(count)  # health
        for row, server in enumerate(self.servers):
            self._enter(row, server)
        self.median_block_ms = self._median_block_ms()
        self.stale = True  # prices have changed since costs-to-go were computed
        self.must_refresh = True
        self.refreshed_at = -math.inf
        self.cached: dict[object, Floats] = {}  # costs-to-go, by what was asked
        self._next_row = 0
        self._removed: set[PeerId] = set()
        self._added: dict[PeerId, Server] = {}

    # ---- who is in it

    def remove_server(self, peer: PeerId) -> None:
        if self._added.pop(peer, None) is None:
            self._removed.add(peer)

    def add_server(self, server: Server) -> None:
        self._added[server.hello.peer] = server

    def apply_membership(self) -> list[int] | None:
        """Take in who went and came since: the rows of those that came, to be priced. None: a new book is needed."""
        if not (self._removed or self._added):
            return []
        gone, come = self._removed, list(self._added.values())
        self._removed, self._added = set(), {}
        table = self.table
        if any(server.hello.zone not in table.zones for server in come):
            return None
        if 2 * (len(table.row_of) - len(gone) + len(come)) < len(table.peers):
            return None  # most rows would be empty
        for row in table.remove_servers(gone):
            self._enter(row, None)
        rows = table.add_servers([_candidate(server) for server in come])
        self._grow(len(table.peers))
        for row, server in zip(rows, come, strict=True):
            self._enter(row, server)
        self.must_refresh = True
        return rows

    def _grow(self, count: int) -> None:
        more = count - len(self.servers)
        if not more:
            return
        self.servers += [None] * more
        self.measured_ms = np.append(self.measured_ms, np.full(more, math.nan))
        self.free_pages = np.append(self.free_pages, np.zeros(more))
        self.total_pages = np.append(self.total_pages, np.zeros(more))
        self.page_size = np.append(self.page_size, np.zeros(more))
        self.max_length = np.append(self.max_length, np.full(more, math.inf))
        self.last_resort_ms = np.append(self.last_resort_ms, np.zeros(more))
        self.score = np.append(self.score, np.ones(more))

    def _enter(self, row: int, server: Server | None) -> None:
        """What a row says before it is priced; of an empty one nothing, so that it counts nowhere."""
        self.servers[row] = server
        self.last_resort_ms[row], self.score[row] = 0.0, 1.0
        if server is None:
            self.measured_ms[row], self.max_length[row] = math.nan, math.inf
            self.free_pages[row] = self.total_pages[row] = self.page_size[row] = 0.0
            return
        hello = server.hello
        self.measured_ms[row], self.free_pages[row] = _or_nan(server.measured_block_ms), server.free_pages
        self.total_pages[row], self.page_size[row] = hello.total_pages, hello.page_size
        self.max_length[row] = hello.max_length

    # ---- what it says

    def rows_to_update(self, changed: Iterable[PeerId]) -> set[int]:
        """The rows of servers to be priced again: those that were marked, and some more in turn."""
        rows = {self.table.row_of[peer] for peer in changed}
        count, swept = len(self.servers), 0
        for _ in range(count):
            if swept == UPDATES_PER_CHOICE:
                break
            row, self._next_row = self._next_row, (self._next_row + 1) % count
            if self.servers[row] is not None:
                swept += 1
                rows.add(row)
        return rows

    def occupied(self, rows: Iterable[int]) -> Iterator[tuple[int, Server]]:
        for row in rows:
            server = self.servers[row]
            if server is not None:
                yield row, server

    def set_cost(
        self, row: int, hop_ms: float, block_ms: float, score: float, *, last_resort: bool
    ) -> None:
        """A server costs so much from now on; what else a choice asks of it is looked up."""
        server, table = self.servers[row], self.table
        assert server is not None, "only servers that are linked are priced"
        resort = LAST_RESORT if last_resort else 0.0
        new = hop_ms + resort, block_ms, score, server.free_pages
        old = table.hop_ms[row], table.block_ms[row], self.score[row], self.free_pages[row]
        if resort != self.last_resort_ms[row]:
            self.last_resort_ms[row] = resort
            self.must_refresh = True
        elif new != old:
            self.stale = True
        table.hop_ms[row], table.block_ms[row], self.score[row], self.free_pages[row] = new
        self.measured_ms[row] = _or_nan(server.measured_block_ms)

    @property
    def is_outdated(self) -> bool:
        """Whether costs-to-go would come out differently now."""
        return self.stale or self._zone_version != self._zones.version

    def refresh(self, now: float) -> None:
        """New costs-to-go from here on."""
        self.cached.clear()
        self.refreshed_at, self.stale, self.must_refresh = now, False, False
        self.median_block_ms = self._median_block_ms()
        if self._zone_version != self._zones.version:
            self._zone_version = self._zones.version
            self.table.set_delays(self._zones.delay_ms)

    def _median_block_ms(self) -> float:
        known = self.measured_ms[~np.isnan(self.measured_ms)]
        middle = known.size // 2
        # np.median would import numpy.ma: a quarter of a second without a token
        usual = float(np.partition(known, middle)[middle]) if known.size else DEFAULT_BLOCK_MS
        return max(MIN_BLOCK_MS, usual)


def _candidate(server: Server) -> Candidate:
    hello = server.hello
    return Candidate(hello.peer, hello.first, hello.last, hello.zone)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
