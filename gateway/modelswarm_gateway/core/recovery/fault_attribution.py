"""Fault attribution (R5, one loop): find the link or server that kept a session from its token.

Evidence are the counters that the hops froze when they were fenced. They tell a link that loses rows or windows from a
server that had rows and made no step. Used by the recovery loop once all hops have acknowledged. `attribute` is pure;
`attribute_overdue` reports the result to the server registry. A FaultReport that names a link and a hop that does not
acknowledge are handled elsewhere: both name the fault themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm.protocol.messages import Counters
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.sessions.session import Session

# Faults that sessions report within this time in seconds are one failure of a link.
SAME_FAILURE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class HopEvidence:
    """The counters of one hop for the epoch without a token."""

    peer: PeerId
    counters: Counters | None
    is_idle: bool  # its server has made no step for a long time


@dataclass(frozen=True, slots=True)
class Culprit:
    """The faulty part: one server, or the link between two."""

    peers: tuple[PeerId, ...]


def attribute(hops: Sequence[HopEvidence], epoch: Epoch, due_position: int) -> Culprit | None:
    """Return the faulty part; None if the counters show no fault, as when the hops were merely slow.

    Hops are in route order; `due_position` is the position of the token that did not come.
    """
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
    """Return the first server that has rows it may run and makes no step."""
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
    """Report the fault to the registry; return the servers that the session should avoid if it can."""
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
        # The pair is sorted: a lost token and then a lost window are failures of the same link.
        one, other = sorted(found.peers)
        registry.on_link_failed(one, other, -1 - int(now / SAME_FAILURE_SECONDS), now)
        return set()
    registry.eject(found.peers[0], "overdue", now)
    return set(found.peers)
