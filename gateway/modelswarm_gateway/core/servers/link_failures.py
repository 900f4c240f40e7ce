"""Failures of the link between two servers that both run (R5, one loop).

The part `registry.links` of the server registry; recovery and migration plan around unreliable links. A failure is
forgotten after a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from modelswarm.protocol.identity import PeerId

# Number of failures, counted from one end, from which a link is unreliable.
MIN_FAILURES = 2
# Number of failures of a link that are counted: a link that keeps failing is never forgotten.
MAX_FAILURES = 64


@dataclass(slots=True)
class _Failures:
    seen: set[tuple[PeerId, int]] = field(default_factory=set)  # reporter, generation of the link
    last_at: float = 0.0


class LinkFailures:
    def __init__(self, seconds: float) -> None:
        """`seconds`: time after the last failure of a link from which its failures no longer count."""
        self._seconds = seconds
        self._failures: dict[frozenset[PeerId], _Failures] = {}  # the last to fail comes last
        # Kept here because each plan asks for it: when a network fails, thousands of links do.
        self._unreliable: dict[frozenset[PeerId], int] = {}

    def record_failure(self, reporter: PeerId, peer: PeerId, generation: int, now: float) -> None:
        """Count a link that broke or lost messages; each generation of a link counts once."""
        self._forget_old(now)
        names = frozenset((reporter, peer))
        known = self._failures.pop(names, None)
        pair = self._failures[names] = known or _Failures()
        pair.last_at = now
        if len(pair.seen) < MAX_FAILURES:
            pair.seen.add((reporter, generation))
        count = max(Counter(reporter for reporter, _ in pair.seen).values())
        if count >= MIN_FAILURES:
            self._unreliable[names] = count

    def unreliable(self, now: float) -> Mapping[frozenset[PeerId], int]:
        """Return the pairs of servers to avoid, with the number of failures counted from one end."""
        self._forget_old(now)
        return self._unreliable

    def _forget_old(self, now: float) -> None:
        while self._failures:
            names, pair = next(iter(self._failures.items()))
            if now - pair.last_at <= self._seconds:
                return
            del self._failures[names]
            self._unreliable.pop(names, None)


def unreliable_neighbours(
    peers: Collection[PeerId], bad_links: Mapping[frozenset[PeerId], int]
) -> frozenset[PeerId]:
    """Return servers with an unreliable link to any of `peers`."""
    return frozenset(
        other for link in bad_links for peer in link.intersection(peers) for other in link - {peer}
    )


def unreliable_links(
    route: Sequence[PeerId], bad_links: Mapping[frozenset[PeerId], int]
) -> dict[frozenset[PeerId], int]:
    """Return the unreliable links of a route: between neighbours, and from tail to head, which the ring joins."""
    links = zip(route, [*route[1:], route[0]], strict=True)
    return {pair: bad_links[pair] for link in links if (pair := frozenset(link)) in bad_links}
