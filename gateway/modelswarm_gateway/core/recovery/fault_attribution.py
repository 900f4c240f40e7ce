"""Whose fault it was that a session came to no token (R5): read off the counters that its hops froze when fenced.

Pure; used by `detection.py` once all hops have answered. A link that swallows rows or windows is told from a server
that had rows and did nothing with them. A Report that names a link comes before, a silent hop blames itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm.protocol.messages import Counters
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.sessions.session import Session

SAME_FAILURE_SECONDS = (
    0.5  # seconds: what several sessions find within them is one failure of a link
)


@dataclass(frozen=True, slots=True)
class HopEvidence:
    """A hop's answer: what it had seen of the epoch that came to nothing."""

    peer: PeerId
    counters: Counters | None
    is_idle: bool  # its server has made no step for long


@dataclass(frozen=True, slots=True)
class Culprit:
    """Two servers: the link between them. One: itself."""

    peers: tuple[PeerId, ...]


def attribute(hops: Sequence[HopEvidence], epoch: Epoch, due_position: int) -> Culprit | None:
    """Hops in route order; `owed` is the position of the token that did not come. None: nothing can be read off them,
    as when they merely were slow."""
    seen = [hop.counters for hop in hops]
    if any(counters is None or counters.epoch != epoch for counters in seen):
        return None
    tuples = [counters for counters in seen if counters is not None]
    return (
        _faulty_link(hops, tuples)
        or _faulty_ring_link(hops, tuples)
        or _idle_server(hops, tuples, due_position)
    )


def _faulty_link(hops: Sequence[HopEvidence], seen: Sequence[Counters]) -> Culprit | None:
    for index, (here, there) in enumerate(pairwise(seen)):
        lost_rows = here.sent > there.received
        lost_window = there.granted > here.window and here.sent >= here.window
        if (lost_rows or lost_window) and hops[index].peer != hops[index + 1].peer:
            return Culprit((hops[index].peer, hops[index + 1].peer))
    return None


def _faulty_ring_link(hops: Sequence[HopEvidence], seen: Sequence[Counters]) -> Culprit | None:
    head, tail = hops[0].peer, hops[-1].peer
    if head != tail and seen[-1].tokens_sent > seen[0].tokens_received:
        return Culprit((tail, head))
    return None


def _idle_server(
    hops: Sequence[HopEvidence], seen: Sequence[Counters], due_position: int
) -> Culprit | None:
    """The first hop that has rows and does nothing with them, although it may."""
    for hop, counters in zip(hops, seen, strict=True):
        last = hop is hops[-1]
        waits = (
            due_position <= counters.received if last else counters.sent < _max_sendable(counters)
        )
        if waits and hop.is_idle:
            return Culprit((hop.peer,))
    return None


def _max_sendable(counters: Counters) -> int:
    return min(counters.received, counters.window)


def attribute_overdue(session: Session, registry: ServerRegistry, now: float) -> set[PeerId]:
    """The servers that the session is to do without, if it can."""
    epoch, session.overdue_epoch = session.overdue_epoch, None
    if epoch is None:
        return set()
    found = attribute(
        [
            HopEvidence(
                hop.peer, hop.counters, not registry.health.step_times(hop.peer).is_progressing(now)
            )
            for hop in session.hops
        ],
        epoch,
        session.length,
    )
    if found is None:
        return set()
    if len(found.peers) == 2:
        # failures count as seen from one end: first a lost token, then a lost window is the same link seen by us
        one, other = sorted(found.peers)
        registry.on_link_failed(one, other, -1 - int(now / SAME_FAILURE_SECONDS), now)
        return set()
    registry.eject(found.peers[0], "overdue", now)
    return set(found.peers)
