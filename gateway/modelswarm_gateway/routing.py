"""Which servers carry a session's blocks. Pure; called by the gateway core for new sessions and for repairs.

Backward dynamic programming over (block, server): a hop uses a server from where the route enters it to the
server's end, so spans may overlap and routes may enter mid-span. Knows no health yet: the cost of a server is the
number of hops it already carries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId

HOP_COST = 1.0  # fewer hops first: a hop costs about as much as a few sessions' load
PAIR_COST = 1000.0  # a pair that keeps failing is the last resort, not forbidden


@dataclass(frozen=True, slots=True)
class Candidate:
    peer: PeerId
    first: int
    last: int
    load: float  # in sessions, at least 0


@dataclass(frozen=True, slots=True)
class Leg:
    peer: PeerId
    first: int
    last: int


def cover(
    candidates: Sequence[Candidate],
    blocks: tuple[int, int],
    *,
    before: PeerId | None = None,
    after: PeerId | None = None,
    bad_pairs: Collection[frozenset[PeerId]] = (),
    jitter: Callable[[], float] = lambda: 0.0,
) -> list[Leg] | None:
    """Cheapest chain of servers over `blocks`, between the kept hops `before` and `after`; None if there is none.

    `jitter` in [0, 1) breaks ties, so that equal servers share the load.
    """
    first, last = blocks
    price = {c.peer: HOP_COST + 0.1 * c.load + 0.01 * jitter() for c in candidates}

    def pair(left: PeerId | None, right: PeerId | None) -> float:
        known = left is not None and right is not None and left != right
        return PAIR_COST if known and frozenset((str(left), str(right))) in bad_pairs else 0.0

    best: dict[tuple[int, PeerId], tuple[float, Leg | None]] = {}
    for block in range(last - 1, first - 1, -1):
        for c in candidates:
            if c.first <= block < c.last:
                end = min(c.last, last)
                here = price[c.peer] * (end - block) / max(1, c.last - c.first)
                rest, onward = _onward(best, candidates, end, last, after, c.peer, pair)
                best[block, c.peer] = (HOP_COST + here + rest, onward)
    starts = [
        (best[first, c.peer][0] + pair(before, c.peer), c)
        for c in candidates
        if (first, c.peer) in best
    ]
    finite = [entry for entry in starts if entry[0] < float("inf")]
    if not finite:
        return None
    chosen = min(finite, key=lambda entry: entry[0])[1]
    return _walk(best, Leg(chosen.peer, first, min(chosen.last, last)))


def _onward(
    best: Mapping[tuple[int, PeerId], tuple[float, Leg | None]],
    candidates: Sequence[Candidate],
    block: int,
    last: int,
    after: PeerId | None,
    here: PeerId,
    pair: Callable[[PeerId | None, PeerId | None], float],
) -> tuple[float, Leg | None]:
    """Cost of what follows a hop that ends at `block`, and the next leg."""
    if block == last:
        return pair(here, after), None
    options = [
        (best[block, c.peer][0] + pair(here, c.peer), c)
        for c in candidates
        if (block, c.peer) in best and c.peer != here
    ]
    if not options:
        return float("inf"), None
    cost, c = min(options, key=lambda option: option[0])
    return cost, Leg(c.peer, block, min(c.last, last))


def _walk(best: Mapping[tuple[int, PeerId], tuple[float, Leg | None]], leg: Leg) -> list[Leg]:
    legs = [leg]
    while (onward := best[legs[-1].first, legs[-1].peer][1]) is not None:
        legs.append(onward)
    return legs
