"""What every server costs now, in the columns that routes are chosen from; kept up to date as beats and hops come.

Used by `fleet.py`. A change marks a server; the next choice prices the marked ones again, and a few others in turn, so
that what changes with time alone is seen too. Costs-to-go are kept between choices for a moment: their age matters
little, since every hop is drawn at prices of now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.routing.cost_table import Book
from modelswarm_gateway.core.routing.path_search import LAST_RESORT, Floats, Leg
from modelswarm_gateway.core.routing.zones import Zones
from modelswarm_gateway.core.servers.health import Standing
from modelswarm_gateway.core.servers.server import (
    HANDLING_MS,
    NOISE_MS,
    UNKNOWN_BLOCK_MS,
    Server,
    kv_wait_ms,
)

KEPT_SECONDS = 0.05  # costs-to-go may be so old, unless who is a last resort has changed
MOST_KEPT = 64
OTHER_DOMAIN_MS = 50.0  # a repair goes so far out of its way for another failure domain
DEAREST_MS = 1e5  # of a block, a hop or its KV, whatever is said: less than a last resort
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


class Pricing:
    """One book per kind of servers; the fleet says which servers that are."""

    def __init__(
        self, standing: Callable[[PeerId, float], Standing], failing_seconds: float
    ) -> None:
        self._standing = standing
        self._failing_seconds = failing_seconds
        self.zones = Zones()
        self._books: dict[object, Book] = {}
        self._marked: set[PeerId] = set()

    def joined(self, key: object, server: Server) -> None:
        """A server of the kind `key` came; one that went is told of first."""
        if book := self._books.get(key):
            book.joined(server)

    def left(self, key: object, peer: PeerId) -> None:
        self._marked.discard(peer)
        if book := self._books.get(key):
            book.left(peer)

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
    def _zone(book: Book, peer: PeerId | None) -> str | None:
        """None also for a server that is not in the book: where it is does not matter then."""
        row = None if peer is None else book.table.row.get(peer)
        server = None if row is None else book.servers[row]
        return None if server is None else server.hello.zone

    # ---- keeping the books

    def _fresh(
        self, key: object, servers: Callable[[], Sequence[Server]], now: float
    ) -> Book | None:
        book = self._books.get(key)
        new = None if book is None else book.follow()
        if book is None or new is None:
            self._books.pop(key, None)
            found = servers()
            if not found:
                return None
            book = self._books[key] = Book(found, self.zones)
            new = list(range(len(book.servers)))
        marked = {peer for peer in self._marked if peer in book.table.row}
        self._marked -= marked
        for row, server in book.filled(book.due(marked).union(new)):
            price = self.price(server, book.usual_ms, now)
            last = price.last_resort
            book.put(row, price.hop_ms, price.block_ms, price.score, last_resort=last)
        if book.urgent or (book.outdated and abs(now - book.priced_at) >= KEPT_SECONDS):
            book.settle(now)
        return book


def _extra(book: Book, needs: Needs) -> tuple[Floats | None, object]:
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
