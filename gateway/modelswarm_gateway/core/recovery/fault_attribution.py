"""Fault attribution (R5, one loop): find the link or server that kept a session from its token.

Evidence are the counters that the hops froze when they were fenced. They tell a link that loses rows or windows from a
server that had rows and made no step. Used by the recovery loop once all hops have acknowledged. `attribute` is pure;
`attribute_overdue` reports the result to the server registry. A FaultReport that names a link and a hop that does not
acknowledge are handled elsewhere: both name the fault themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm.protocol.messages import Counters
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.sessions.session import Hop, Session

# Faults that sessions report within this time in seconds are one failure of a link.
SAME_FAILURE_SECONDS = 0.5
# Number of overdue tokens from which an idle tail that may compile a grammar is at fault: after some 8 s.
GRAMMAR_OVERDUES = 3


def attribute(
    hops: Sequence[Hop], idle: Collection[PeerId], epoch: Epoch, due_position: int
) -> tuple[PeerId, ...]:
    """Return the faulty server, or both ends of the faulty link; () if the hops were merely slow.

    Hops are in route order; `due_position` is the position of the token that did not come. Servers that are `idle`
    have made no step for a long time.
    """
    seen = [c for hop in hops if (c := hop.counters) is not None and c.epoch == epoch]
    if len(seen) < len(hops):
        return ()
    return (
        _faulty_link(hops, seen)
        or _faulty_ring_link(hops, seen)
        or _idle_server(hops, seen, idle, due_position)
    )


def _faulty_link(hops: Sequence[Hop], seen: Sequence[Counters]) -> tuple[PeerId, ...]:
    for index, (here, there) in enumerate(pairwise(seen)):
        lost_rows = here.sent > there.received
        lost_window = there.granted > here.window and here.sent >= here.window
        lost_ack = here.unsent > 0 and here.sent < here.window  # all bulk rows came (R9, lanes)
        if (lost_rows or lost_window or lost_ack) and hops[index].peer != hops[index + 1].peer:
            return (hops[index].peer, hops[index + 1].peer)
    return ()


def _faulty_ring_link(hops: Sequence[Hop], seen: Sequence[Counters]) -> tuple[PeerId, ...]:
    head, tail = hops[0].peer, hops[-1].peer
    if head != tail and seen[-1].tokens_sent > seen[0].tokens_received:
        return (tail, head)
    return ()


def _idle_server(
    hops: Sequence[Hop], seen: Sequence[Counters], idle: Collection[PeerId], due_position: int
) -> tuple[PeerId, ...]:
    """Return the first server that has rows it may run and makes no step."""
    for hop, counters in zip(hops, seen, strict=True):
        sendable = min(counters.received, counters.window)
        waits = due_position <= counters.received if hop is hops[-1] else counters.sent < sendable
        if waits and hop.peer in idle:
            return (hop.peer,)
    return ()


def _may_compile_grammar(session: Session) -> bool:
    """True if the tail may have sampled nothing because it was compiling the grammar: no counter shows that, either.

    It compiles before the first token of an epoch. A token resets the attempts, of which the present loop is one.
    """
    has_no_token = session.attempts > 1 and session.overdue_attempts < GRAMMAR_OVERDUES
    return has_no_token and session.turn.sampling.grammar is not None


def attribute_overdue(session: Session, registry: ServerRegistry, now: float) -> set[PeerId]:
    """Report the fault to the registry; return the servers that the session should avoid if it can."""
    epoch, session.overdue_epoch = session.overdue_epoch, None
    if epoch is None:
        return set()
    step_times = registry.health.step_times
    # A hop behind the head may wait for rows of its blocks (R14, opaque rows): no counter shows them.
    idle = {
        hop.peer
        for place, hop in enumerate(session.hops)
        if not step_times(hop.peer).is_progressing(now)
        and (place == 0 or hop.kv >= session.turn.prompt_rows)
        and not (hop is session.hops[-1] and _may_compile_grammar(session))
    }
    found = attribute(session.hops, idle, epoch, session.length)
    if len(found) == 2:
        # The pair is sorted: a lost token and then a lost window are failures of the same link.
        one, other = sorted(found)
        registry.on_link_failed(one, other, -1 - int(now / SAME_FAILURE_SECONDS), now)
        return set()
    for peer in found:
        registry.eject(peer, "overdue", now)
    return set(found)
