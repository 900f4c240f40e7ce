"""Search for a ring of servers without an unreliable link (R5, one loop).

Pure. Used by `recovery/route_planner.py` when the cheapest route has such a link. The path search cannot avoid links:
its costs are those of zones. This search knows no costs: a route that works comes before a fast one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.routing.path_search import RouteHop

# Most servers that are looked at as the next hop: some 20 ms.
MAX_STEPS = 100_000


def find_ring(
    spans: Mapping[PeerId, tuple[int, int]],
    blocks: tuple[int, int],
    bad_links: Collection[frozenset[PeerId]],
) -> list[RouteHop] | None:
    """Return the hops of a route with as few of them as its head allows; None if there is none.

    `blocks` [begin, end) are those of the route. `spans`: blocks [first, last) of each server, the preferred servers
    first. As in the path search, a hop uses a server from where the route enters it to the server's end. A route's own
    end comes first. The tail also has a link to the head.
    """
    return _RingSearch(spans, blocks, bad_links).find()


class _RingSearch:
    """A breadth-first search from each head in turn, which reaches every server once."""

    def __init__(
        self,
        spans: Mapping[PeerId, tuple[int, int]],
        blocks: tuple[int, int],
        bad_links: Collection[frozenset[PeerId]],
    ) -> None:
        self._spans = spans
        self._begin, self._end = blocks
        self._bad_links = frozenset(bad_links)
        self._at_block: dict[int, list[PeerId]] = {}  # servers that the search can enter there
        self._steps = 0

    def find(self) -> list[RouteHop] | None:
        for head in self._entered_at(self._begin):
            ring = self._find_from(head)
            if ring is not None or self._steps > MAX_STEPS:
                return ring
        return None

    def _entered_at(self, block: int) -> Sequence[PeerId]:
        if block not in self._at_block:
            spans = self._spans.items()
            self._at_block[block] = [peer for peer, (first, last) in spans if first <= block < last]
        return self._at_block[block]

    def _find_from(self, head: PeerId) -> list[RouteHop] | None:
        hops = {head: [self._hop(head, self._begin)]}  # by last server
        front = deque(hops)
        left: dict[int, Sequence[PeerId]] = {}  # by block: servers that were not reached there
        while front and self._steps <= MAX_STEPS:
            before = front.popleft()
            edge = hops[before][-1].last
            if edge == self._end:
                if not self._is_bad(before, head):
                    return hops[before]
                continue
            missed: list[PeerId] = []
            for peer in left.get(edge, self._entered_at(edge)):
                self._steps += 1
                if peer in hops:
                    continue
                if self._is_bad(before, peer):
                    missed.append(peer)
                    continue
                hops[peer] = [*hops[before], self._hop(peer, edge)]
                front.append(peer)
            left[edge] = missed
        return None

    def _hop(self, peer: PeerId, edge: int) -> RouteHop:
        return RouteHop(peer, edge, min(self._spans[peer][1], self._end))

    def _is_bad(self, one: PeerId, other: PeerId) -> bool:
        return frozenset((one, other)) in self._bad_links
