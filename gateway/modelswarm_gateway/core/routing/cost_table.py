"""The cost table of one variant: one row per server, in columns, updated in place.

Kept by `cost_model.py`, which says what a server costs. It extends the table that paths are searched in
(`path_search.py`) by the columns that costs depend on. Servers that connect or disconnect change only the rows of their
own blocks. Knows neither sessions nor how a cost is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.routing.path_search import (
    LAST_RESORT,
    Candidate,
    Floats,
    PathTable,
    Rows,
)
from modelswarm_gateway.core.routing.zones import ZoneDelays
from modelswarm_gateway.core.servers.server import DEFAULT_BLOCK_MS, Server

# Number of unchanged servers whose cost is computed again at every choice, in turn: costs change with time, too.
UPDATES_PER_CHOICE = 32
# Least median block time, in ms.
MIN_BLOCK_MS = 0.001


class CostTable(PathTable):
    def __init__(self, servers: Sequence[Server], zones: ZoneDelays) -> None:
        """At least one server. No row has a cost yet, but the median block time is known."""
        self._zones = zones
        self._zone_version = zones.version
        # The columns of this class come first: the constructor of the base class appends rows to them.
        self.servers: list[Server | None] = []
        self.measured_ms: Floats = np.zeros(0)  # measured block times; NaN: none
        self.free_pages: Floats = np.zeros(0)
        self.total_pages: Floats = np.zeros(0)
        self.page_size: Floats = np.zeros(0)
        self.max_length: Floats = np.zeros(0)
        self.last_resort_ms: Floats = np.zeros(0)  # LAST_RESORT or 0
        self.score: Floats = np.zeros(0)  # health
        self.grammar: Rows = np.zeros(0, dtype=np.intp)  # `grammar_id` of its version
        self._grammar_ids = {"": 0}
        self.numerics: Rows = np.zeros(0, dtype=np.intp)  # `numerics_id` of its class
        self._numerics_ids = {"": 0}
        candidates = [_candidate(server) for server in servers]
        super().__init__(candidates, servers[0].hello.n_blocks, zones.delay_ms)
        for server in servers:
            self._fill_row(self.row_of[server.hello.peer], server)
        self.median_block_ms = self._median_block_ms()
        self.stale = True  # costs have changed since costs-to-go were computed
        self.must_refresh = True  # cached costs-to-go may not be used any more
        self.refreshed_at = -math.inf
        self.cached: dict[object, Floats] = {}  # costs-to-go, by the question
        self._next_row = 0
        self._removed: set[PeerId] = set()
        self._added: dict[PeerId, Server] = {}

    # ---- membership

    def remove_server(self, peer: PeerId) -> None:
        """Remove a server at the next `apply_membership`."""
        if self._added.pop(peer, None) is None:
            self._removed.add(peer)

    def add_server(self, server: Server) -> None:
        """Add a server at the next `apply_membership`."""
        self._added[server.hello.peer] = server

    @property
    def has_servers(self) -> bool:
        """True if a server is left after the next `apply_membership`."""
        return bool(self._added) or len(self._removed) < len(self.row_of)

    def apply_membership(self) -> list[int] | None:
        """Add and remove the servers of these calls. Returns the rows that need a cost; None: make a new table."""
        if not (self._removed or self._added):
            return []
        removed, added = self._removed, list(self._added.values())
        self._removed, self._added = set(), {}
        if any(server.hello.zone not in self.zones for server in added):
            return None
        if 2 * (len(self.row_of) - len(removed) + len(added)) < len(self.peers):
            return None  # most rows would be empty
        for row in self.remove_peers(removed):
            self._fill_row(row, None)
        rows = self.add_candidates([_candidate(server) for server in added])
        for row, server in zip(rows, added, strict=True):
            self._fill_row(row, server)
        self.must_refresh = True
        return rows

    def _append_rows(self, count: int) -> None:
        super()._append_rows(count)
        self.servers += [None] * count
        self.measured_ms = np.append(self.measured_ms, np.full(count, math.nan))
        self.free_pages = np.append(self.free_pages, np.zeros(count))
        self.total_pages = np.append(self.total_pages, np.zeros(count))
        self.page_size = np.append(self.page_size, np.zeros(count))
        self.max_length = np.append(self.max_length, np.full(count, math.inf))
        self.last_resort_ms = np.append(self.last_resort_ms, np.zeros(count))
        self.score = np.append(self.score, np.ones(count))
        self.grammar = np.append(self.grammar, np.zeros(count, dtype=np.intp))
        self.numerics = np.append(self.numerics, np.zeros(count, dtype=np.intp))

    def _fill_row(self, row: int, server: Server | None) -> None:
        """Set a row before it has a cost. An empty row gets values that count nowhere."""
        self.servers[row] = server
        self.last_resort_ms[row], self.score[row] = 0.0, 1.0
        self.grammar[row] = self.grammar_id("" if server is None else server.hello.grammar)
        self.numerics[row] = self.numerics_id("" if server is None else server.hello.numerics)
        if server is None:
            self.measured_ms[row], self.max_length[row] = math.nan, math.inf
            self.free_pages[row] = self.total_pages[row] = self.page_size[row] = 0.0
            return
        hello = server.hello
        self.measured_ms[row] = _or_nan(server.measured_block_ms)
        self.free_pages[row] = server.free_pages
        self.total_pages[row], self.page_size[row] = hello.total_pages, hello.page_size
        self.max_length[row] = hello.max_length

    def grammar_id(self, version: str) -> int:
        """Return the number of a version of grammars in the column `grammar`."""
        return self._grammar_ids.setdefault(version, len(self._grammar_ids))

    def numerics_id(self, name: str) -> int:
        """Return the number of a numerics class in the column `numerics`."""
        return self._numerics_ids.setdefault(name, len(self._numerics_ids))

    # ---- costs

    def rows_to_update(self, changed: Iterable[PeerId]) -> set[int]:
        """Return the rows whose cost is to be computed again: those of `changed`, and some others in turn."""
        rows = {self.row_of[peer] for peer in changed}
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
        """Yield those of `rows` that have a server, with it."""
        for row in rows:
            server = self.servers[row]
            if server is not None:
                yield row, server

    def set_cost(
        self, row: int, hop_ms: float, block_ms: float, score: float, *, last_resort: bool
    ) -> None:
        """Set the cost of a server, and read again what else a choice depends on."""
        server = self.servers[row]
        assert server is not None, "only servers that are connected have a cost"
        resort = LAST_RESORT if last_resort else 0.0
        new = hop_ms + resort, block_ms, score, server.free_pages
        old = self.hop_ms[row], self.block_ms[row], self.score[row], self.free_pages[row]
        if resort != self.last_resort_ms[row]:
            self.last_resort_ms[row] = resort
            self.must_refresh = True
        elif new != old:
            self.stale = True
        self.hop_ms[row], self.block_ms[row], self.score[row], self.free_pages[row] = new
        self.measured_ms[row] = _or_nan(server.measured_block_ms)

    @property
    def is_outdated(self) -> bool:
        """True if costs-to-go would differ if they were computed now."""
        return self.stale or self._zone_version != self._zones.version

    def refresh(self, now: float) -> None:
        """Drop the cached costs-to-go, and read the median block time and the zone delays again."""
        self.cached.clear()
        self.refreshed_at, self.stale, self.must_refresh = now, False, False
        self.median_block_ms = self._median_block_ms()
        if self._zone_version != self._zones.version:
            self._zone_version = self._zones.version
            self.set_delays(self._zones.delay_ms)

    def _median_block_ms(self) -> float:
        known = self.measured_ms[~np.isnan(self.measured_ms)]
        middle = known.size // 2
        # np.median would import numpy.ma: a quarter of a second without a token
        median = float(np.partition(known, middle)[middle]) if known.size else DEFAULT_BLOCK_MS
        return max(MIN_BLOCK_MS, median)


def _candidate(server: Server) -> Candidate:
    hello = server.hello
    return Candidate(hello.peer, hello.first, hello.last, hello.zone)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
