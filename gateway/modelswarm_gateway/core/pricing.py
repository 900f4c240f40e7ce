"""What every server costs now, in the columns that routes are chosen from; kept up to date as beats and hops come.

Used by `fleet.py`. A change marks a server; the next choice prices the marked ones again, and a few others in turn, so
that what changes with time alone is seen too. Costs-to-go are kept between choices for a moment: their age matters
little, since every hop is drawn at prices of now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.health import Standing
from modelswarm_gateway.core.servers import (
    HANDLING_MS,
    NOISE_MS,
    UNKNOWN_BLOCK_MS,
    Server,
    kv_wait_ms,
)
from modelswarm_gateway.core.zones import Zones
from modelswarm_gateway.routing import LAST_RESORT, Candidate, Floats, Leg, Table

KEPT_SECONDS = 0.05  # costs-to-go may be so old, unless who is a last resort has changed
SWEPT = 32  # servers priced again at every choice, in turn
MOST_KEPT = 64
OTHER_DOMAIN_MS = 50.0  # a repair goes so far out of its way for another failure domain
DEAREST_MS = 1e5  # of a block, a hop or its KV, whatever is said: less than a last resort
LEAST_USUAL_MS = 0.001  # of a block
TOO_SHORT = 100 * LAST_RESORT  # a server that can never hold the session


@dataclass(frozen=True, slots=True)
class Needs:
    """What one session asks of the servers that are to carry some of its blocks."""

    length: int = 0  # entries it may come to have
    positions: int = 0  # of KV to be reserved on a new hop
    repair: bool = False  # may use the pages kept for repairs (R12)
    away_from: frozenset[str] = frozenset()  # failure domains of the hops it lost
    without: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class Price:
    """One server's price and what it is made of; for those who want to know why."""

    block_ms: float  # of a block, health included
    hop_ms: float  # once per hop, health included; KV wait left out
    queue_ms: float
    far_ms: float  # how much farther it is than the nearest of its zone
    load: float
    standing: Standing
    score: float  # what the costs of its blocks, its hop and its KV are divided by
    last_resort: bool


@dataclass(slots=True)
class _Book:
    """The servers of one kind."""

    table: Table
    servers: list[Server]  # by row
    raw_ms: Floats  # measured block times; NaN: none
    free: Floats  # pages
    total: Floats
    page: Floats
    longest: Floats
    resort: Floats  # LAST_RESORT or 0
    score: Floats  # health
    usual_ms: float = UNKNOWN_BLOCK_MS
    zone_changes: int = -1
    next_row: int = 0
    priced_at: float = -math.inf
    stale: bool = True  # prices have changed since
    urgent: bool = True
    kept: dict[object, Floats] = field(default_factory=dict)  # costs-to-go, by what was asked


class Pricing:
    """One book per kind of servers; the fleet says which servers that are."""

    def __init__(
        self, standing: Callable[[PeerId, float], Standing], failing_seconds: float
    ) -> None:
        self._standing = standing
        self._failing_seconds = failing_seconds
        self.zones = Zones()
        self._books: dict[object, _Book] = {}
        self._marked: set[PeerId] = set()

    def forget(self) -> None:
        """Servers came or went."""
        self._books.clear()

    def mark(self, peer: PeerId) -> None:
        """Something about this server has changed."""
        self._marked.add(peer)

    def price(self, server: Server, usual_ms: float, now: float) -> Price:
        peer = server.hello.peer
        standing = self._standing(peer, now)
        score, block_ms = standing.score, server.block_ms(usual_ms, now)
        if standing.canary:  # its last step may be the one that it was frozen in
            score, block_ms = 1.0, min(block_ms, usual_ms)
        failing = now - server.failed_at <= self._failing_seconds
        near = self.zones.near_ms(server.hello.zone)
        far = max(0.0, (server.rtt_ms or 0.0) - near - NOISE_MS) / 2
        hop_ms = server.queue_ms + far + HANDLING_MS * server.slowdown
        return Price(
            block_ms=min(DEAREST_MS, block_ms / score),
            hop_ms=min(DEAREST_MS, hop_ms / score),
            queue_ms=server.queue_ms,
            far_ms=far,
            load=server.load,
            standing=standing,
            score=score,
            last_resort=server.draining or standing.ejected or failing,
        )

    # ---- choosing

    def cover(
        self,
        key: object,
        servers: Callable[[], Sequence[Server]],
        blocks: tuple[int, int],
        between: tuple[PeerId | None, PeerId | None],
        needs: Needs,
        now: float,
        draw: Callable[[], float] | None,
    ) -> list[Leg] | None:
        """Servers for `blocks` between two that stay; those that are a last resort only where nobody else is.

        `servers` tells those of the kind `key`, when they are not known yet. Without `draw`: the cheapest.
        """
        book = self._fresh(key, servers, now)
        if book is None:
            return None
        table = book.table
        before, after = (self._zone(book, peer) for peer in between)
        extra, asked = _extra(book, needs)
        hop_ms = table.hop_ms if extra is None else table.hop_ms + extra
        to_go = book.kept.get((blocks, after, asked))
        if to_go is None:
            if len(book.kept) >= MOST_KEPT:
                book.kept.clear()
            to_go = table.to_go(blocks, hop_ms, after)
            book.kept[blocks, after, asked] = to_go
        return table.walk(blocks, to_go, hop_ms, before, draw)

    def cost(
        self,
        key: object,
        servers: Callable[[], Sequence[Server]],
        route: Sequence[tuple[PeerId, int, int]],
        now: float,
    ) -> float:
        """What a route of (peer, first, last) would cost somebody new."""
        book = self._fresh(key, servers, now)
        return math.inf if book is None else book.table.cost(route)

    def usual_ms(self, key: object) -> float:
        book = self._books.get(key)
        return UNKNOWN_BLOCK_MS if book is None else book.usual_ms

    @staticmethod
    def _zone(book: _Book, peer: PeerId | None) -> str | None:
        """None also for a server that is not in the book: where it is does not matter then."""
        row = None if peer is None else book.table.row.get(peer)
        return None if row is None else book.servers[row].hello.zone

    # ---- keeping the books

    def _fresh(
        self, key: object, servers: Callable[[], Sequence[Server]], now: float
    ) -> _Book | None:
        book = self._books.get(key)
        if book is None:
            found = servers()
            if not found:
                return None
            book = self._books[key] = self._open(found)
            self._price_rows(book, range(len(book.servers)), now)
        self._update(book, now)
        if book.urgent or (book.stale and abs(now - book.priced_at) >= KEPT_SECONDS):
            self._settle(book, now)
        return book

    def _settle(self, book: _Book, now: float) -> None:
        """New costs-to-go from here on."""
        book.kept.clear()
        book.priced_at, book.stale, book.urgent = now, False, False
        known = book.raw_ms[~np.isnan(book.raw_ms)]
        middle = (
            known.size // 2
        )  # np.median would import numpy.ma: a quarter of a second without a token
        usual = float(np.partition(known, middle)[middle]) if known.size else UNKNOWN_BLOCK_MS
        book.usual_ms = max(LEAST_USUAL_MS, usual)
        if book.zone_changes != self.zones.changes:
            book.zone_changes = self.zones.changes
            book.table.measure(self.zones.delay)

    def _open(self, servers: Sequence[Server]) -> _Book:
        n_blocks = servers[0].hello.n_blocks
        hellos = [server.hello for server in servers]
        table = Table(
            [Candidate(h.peer, h.first, h.last, h.zone) for h in hellos], n_blocks, self.zones.delay
        )
        by_peer: Mapping[PeerId, Server] = {server.hello.peer: server for server in servers}
        rows = [by_peer[peer] for peer in table.peers]
        count = len(rows)
        return _Book(
            table=table,
            servers=rows,
            raw_ms=np.array([_or_nan(server.measured_block_ms) for server in rows]),
            free=np.array([server.free_pages for server in rows]),
            total=np.array([float(server.hello.total_pages) for server in rows]),
            page=np.array([float(server.hello.page_size) for server in rows]),
            longest=np.array([float(server.hello.max_length) for server in rows]),
            resort=np.zeros(count),
            score=np.ones(count),
        )

    def _update(self, book: _Book, now: float) -> None:
        """Price what was marked, and some more in turn."""
        count = len(book.servers)
        marked = {peer for peer in self._marked if peer in book.table.row}
        self._marked -= marked
        rows = {book.table.row[peer] for peer in marked}
        swept = range(book.next_row, book.next_row + min(SWEPT, count))
        book.next_row = (book.next_row + min(SWEPT, count)) % count
        self._price_rows(book, rows.union(row % count for row in swept), now)

    def _price_rows(self, book: _Book, rows: range | set[int], now: float) -> None:
        table = book.table
        for row in rows:
            server = book.servers[row]
            price = self.price(server, book.usual_ms, now)
            resort = LAST_RESORT if price.last_resort else 0.0
            hop_ms, free = price.hop_ms + resort, server.free_pages
            if resort != book.resort[row]:
                book.resort[row] = resort
                book.urgent = True
            elif (
                table.hop_ms[row] != hop_ms
                or table.block_ms[row] != price.block_ms
                or book.free[row] != free
                or book.score[row] != price.score
            ):
                book.stale = True
            table.hop_ms[row], table.block_ms[row] = hop_ms, price.block_ms
            book.raw_ms[row] = _or_nan(server.measured_block_ms)
            book.free[row], book.score[row] = free, price.score


def _extra(book: _Book, needs: Needs) -> tuple[Floats | None, object]:
    """What this session makes a hop cost beyond the common price, and a name for it; None if nothing."""
    asked: list[object] = []
    extra = np.zeros(len(book.servers))
    wait = kv_wait_ms(needs.positions, needs.repair, book.free, book.total, book.page)
    if wait.any():  # of a server that does badly longer than it says, as its steps are
        extra += np.minimum(DEAREST_MS, wait / book.score)
        asked.append((needs.positions, needs.repair))
    if needs.length > book.longest.min():
        extra[book.longest < needs.length] += TOO_SHORT
        asked.append(needs.length)
    zones = [book.table.zones[zone] for zone in needs.away_from if zone in book.table.zones]
    if zones:
        extra[np.isin(book.table.zone, zones)] += OTHER_DOMAIN_MS
        asked.append(needs.away_from)
    out = [book.table.row[peer] for peer in needs.without if peer in book.table.row]
    if out:
        extra[out] = math.inf
        asked.append(frozenset(out))
    return (extra, tuple(asked)) if asked else (None, None)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
