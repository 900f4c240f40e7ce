"""Search for a ring of servers without an unreliable link (R5, one loop).

Pure. Used by `recovery/route_planner.py` when the cheapest route has such a link. The path search cannot avoid links:
its costs are those of zones. This search knows no costs: a route that works comes before a fast one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

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
    begin, stop = blocks
    at_block = {
        block: [
            (peer, min(last, stop))
            for peer, (first, last) in spans.items()
            if first <= block < last
        ]
        for block in range(begin, stop)
    }
    steps = 0
    for head, head_end in at_block[begin]:
        hops = {(head, head_end): [RouteHop(head, begin, head_end)]}  # by last server and its end
        front = deque(hops)
        while front:
            before, edge = front.popleft()
            if edge == stop and frozenset((before, head)) not in bad_links:
                return hops[before, edge]
            for peer, end in at_block.get(edge, ()):
                steps += 1
                if (peer, end) not in hops and frozenset((before, peer)) not in bad_links:
                    hops[peer, end] = [*hops[before, edge], RouteHop(peer, edge, end)]
                    front.append((peer, end))
            if steps > MAX_STEPS:
                return None
    return None
