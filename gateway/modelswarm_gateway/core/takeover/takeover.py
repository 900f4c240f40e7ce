"""Session takeover (R20): a log copy and the hops that another gateway left on the servers become a session here.

Used by `gateway.py` after a search (`session_search.py`). The hops are fenced like those of any session: they change
owner by that Fence or not at all. Decides neither whether nor when to take a session over.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import HopInfo
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.sessions.session import NO_TRUNCATION, Session


def longest_chain(parts: Sequence[tuple[PeerId, HopInfo]]) -> list[tuple[PeerId, HopInfo]]:
    """Return the hops that fit into one route, in block order; of two for the same blocks the one with more KV."""
    route: list[tuple[PeerId, HopInfo]] = []
    for peer, hop in sorted(parts, key=lambda part: (part[1].first, -part[1].kv)):
        if not route or hop.first >= route[-1][1].last:
            route.append((peer, hop))
    return route


def take_over(
    session: Session,
    where: SessionLocation,
    log: FetchedLog,
    registry: ServerRegistry,
    recovery: Recovery,
) -> None:
    """Fill a new session with the log and hops that another gateway left, and fence the hops.

    The hops hold prefixes of what the last epoch ran, and the log is one of them. All others expire with their lease.
    If the route uses one again, it is found by its blocks and created anew, like every new hop.
    """
    assert log.turn is not None
    session.variant = registry.active_variant(session.model)
    session.log, session.turn, session.turn_number = list(log.tokens), log.turn, 1
    session.has_run, session.last_started = True, where.last_started
    compatible = {
        server.hello.peer for server in registry.servers_of(session.model, session.variant)
    }
    hops = [
        recovery.hops.create_hop(peer, hop.first, hop.last)
        for peer, hop in longest_chain(where.hops)
        if peer in compatible
    ]
    for hop in hops:
        hop.kv_limit = hop.log_limit = NO_TRUNCATION  # all they hold is valid
    recovery.adopt_hops(session, hops)
