"""What every server costs now, in the columns that routes are chosen from; kept up to date as beats and hops come.

Used by `server_registry.py`. A change marks a server; the next choice prices the marked ones again, and a few others in turn, so
that what changes with time alone is seen too. Costs-to-go are kept between choices for a moment: their age matters
little, since every hop is drawn at prices of now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.routing.cost_table import CostTable
from modelswarm_gateway.core.routing.path_search import LAST_RESORT, Floats, RouteHop
from modelswarm_gateway.core.routing.zones import ZoneDelays
from modelswarm_gateway.core.servers.health import HealthStatus
from modelswarm_gateway.core.servers.server import (
    HOP_OVERHEAD_MS,
    RTT_NOISE_MS,
    DEFAULT_BLOCK_MS,
    Server,
    kv_wait_ms,
)

CACHE_SECONDS = 0.05  # costs-to-go may be so old, unless who is a last resort has changed
MAX_CACHED = 64
LOST_DOMAIN_MS = 50.0  # a repair goes so far out of its way for another failure domain
MAX_COST_MS = 1e5  # of a block, a hop or its KV, whatever is said: less than a last resort
TOO_SHORT_MS = 100 * LAST_RESORT  # a server that can never hold the session


@dataclass(frozen=True, slots=True)
class Needs:
    """What one session asks of the servers that are to carry some of its blocks."""

    max_length: int = 0  # entries it may come to have
    kv_positions: int = 0  # of KV to be reserved on a new hop
    for_recovery: bool = False  # may use the pages kept for repairs (R12)
    lost_domains: frozenset[str] = frozenset()  # failure domains of the hops it lost
    excluded: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class HopCost:
    """One server's price and what it is made of; for those who want to know why."""

    block_ms: float  # of a block, health included
    hop_ms: float  # once per hop, health included; KV wait left out
    queue_ms: float
    distance_ms: float  # how much farther it is than the nearest of its zone
    load: float
    status: HealthStatus
    score: float  # what the costs of its blocks, its hop and its KV are divided by
    last_resort: bool


class CostModel:
    """One book per kind of servers; the registry says which servers that are."""

    def __init__(
        self, status_of: Callable[[PeerId, float], HealthStatus], failing_seconds: float
    ) -> None:
        self._status_of = status_of
        self._failing_seconds = failing_seconds
        self.zones = ZoneDelays()
        self._tables: dict[object, CostTable] = {}
        self._changed: set[PeerId] = set()

    def add_server(self, key: object, server: Server) -> None:
        """A server of the kind `key` came; one that went is told of first."""
        if book := self._tables.get(key):
            book.add_server(server)

    def remove_server(self, key: object, peer: PeerId) -> None:
        self._changed.discard(peer)
        if book := self._tables.get(key):
            book.remove_server(peer)

    def mark_changed(self, peer: PeerId) -> None:
        """Something about this server has changed."""
        self._changed.add(peer)

    def hop_cost(self, server: Server, median_ms: float, now: float) -> HopCost:
        peer = server.hello.peer
        standing = self._status_of(peer, now)
        score, block_ms = standing.score, server.block_ms(median_ms, now)
        if standing.canary:  # its last step may be the one that it was frozen in
            score, block_ms = 1.0, min(block_ms, median_ms)
        failing = now - server.failed_at <= self._failing_seconds
        near = self.zones.nearest_ms(server.hello.zone)
        far = max(0.0, (server.rtt_ms or 0.0) - near - RTT_NOISE_MS) / 2
        hop_ms = server.queue_ms + far + HOP_OVERHEAD_MS * server.slowdown
        return HopCost(
            block_ms=min(MAX_COST_MS, block_ms / score),
            hop_ms=min(MAX_COST_MS, hop_ms / score),
            queue_ms=server.queue_ms,
            distance_ms=far,
            load=server.load,
            status=standing,
            score=score,
            last_resort=server.draining or standing.ejected or failing,
        )

    # ---- choosing

    def choose_hops(
        self,
        key: object,
        servers: Callable[[], Sequence[Server]],
        blocks: tuple[int, int],
        between: tuple[PeerId | None, PeerId | None],
        needs: Needs,
        now: float,
        draw: Callable[[], float] | None,
    ) -> list[RouteHop] | None:
        """Servers for `blocks` between two that stay; those that are a last resort only where nobody else is.

        `servers` tells those of the kind `key`, when they are not known yet. Without `draw`: the cheapest.
        """
        book = self._current_table(key, servers, now)
        if book is None:
            return None
        table = book.table
        before, after = (self._zone(book, peer) for peer in between)
        extra, asked = _extra_hop_ms(book, needs)
        hop_ms = table.hop_ms if extra is None else table.hop_ms + extra
        to_go = book.cached.get((blocks, after, asked))
        if to_go is None:
            if len(book.cached) >= MAX_CACHED:
                book.cached.clear()
            to_go = table.cost_to_go(blocks, hop_ms, after)
            book.cached[blocks, after, asked] = to_go
        return table.sample_path(blocks, to_go, hop_ms, before, draw)

    def route_cost(
        self,
        key: object,
        servers: Callable[[], Sequence[Server]],
        route: Sequence[tuple[PeerId, int, int]],
        now: float,
    ) -> float:
        """What a route of (peer, first, last) would cost somebody new."""
        book = self._current_table(key, servers, now)
        return math.inf if book is None else book.table.path_cost(route)

    def median_block_ms(self, key: object) -> float:
        book = self._tables.get(key)
        return DEFAULT_BLOCK_MS if book is None else book.median_block_ms

    @staticmethod
    def _zone(book: CostTable, peer: PeerId | None) -> str | None:
        """None also for a server that is not in the book: where it is does not matter then."""
        row = None if peer is None else book.table.row_of.get(peer)
        server = None if row is None else book.servers[row]
        return None if server is None else server.hello.zone

    # ---- keeping the books

    def _current_table(
        self, key: object, servers: Callable[[], Sequence[Server]], now: float
    ) -> CostTable | None:
        book = self._tables.get(key)
        new = None if book is None else book.apply_membership()
        if book is None or new is None:
            self._tables.pop(key, None)
            found = servers()
            if not found:
                return None
            book = self._tables[key] = CostTable(found, self.zones)
            new = list(range(len(book.servers)))
        marked = {peer for peer in self._changed if peer in book.table.row_of}
        self._changed -= marked
        for row, server in book.occupied(book.rows_to_update(marked).union(new)):
            price = self.hop_cost(server, book.median_block_ms, now)
            last = price.last_resort
            book.set_cost(row, price.hop_ms, price.block_ms, price.score, last_resort=last)
        if book.must_refresh or (book.is_outdated and abs(now - book.refreshed_at) >= CACHE_SECONDS):
            book.refresh(now)
        return book


def _extra_hop_ms(book: CostTable, needs: Needs) -> tuple[Floats | None, object]:
    """What this session makes a hop cost beyond the common price, and a name for it; None if nothing."""
    asked: list[object] = []
    extra = np.zeros(len(book.servers))
    wait = kv_wait_ms(needs.kv_positions, needs.for_recovery, book.free_pages, book.total_pages, book.page_size)
    if wait.any():  # of a server that does badly longer than it says, as its steps are
        extra += np.minimum(MAX_COST_MS, wait / book.score)
        asked.append((needs.kv_positions, needs.for_recovery))
    if needs.max_length > book.max_length.min():
        extra[book.max_length < needs.max_length] += TOO_SHORT_MS
        asked.append(needs.max_length)
    zones = [book.table.zones[zone] for zone in needs.lost_domains if zone in book.table.zones]
    if zones:
        extra[np.isin(book.table.zone, zones)] += LOST_DOMAIN_MS
        asked.append(needs.lost_domains)
    out = [book.table.row_of[peer] for peer in needs.excluded if peer in book.table.row_of]
    if out:
        extra[out] = math.inf
        asked.append(frozenset(out))
    return (extra, tuple(asked)) if asked else (None, None)
