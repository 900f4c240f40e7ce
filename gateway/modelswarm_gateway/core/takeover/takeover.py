"""Session takeover (R20): a log copy and the hops that another gateway left on the servers become a session here.

Used by `gateway.py` after a search (`session_search.py`). The hops are fenced like those of any session: they change
owner by that Fence or not at all. Decides neither whether nor when to take a session over.
"""

from __future__ import annotations

from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.sessions.session import NO_TRUNCATION, Session, longest_chain


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
    session.has_run, session.newest_run_epoch = True, where.last_started
    compatible = {
        server.hello.peer for server in registry.servers_of(session.model, session.variant)
    }
    found = [
        recovery.hops.create_hop(peer, hop.first, hop.last, kv=hop.kv)
        for peer, hop in where.hops
        if peer in compatible
    ]
    hops = longest_chain(found)
    for hop in hops:  # they may have run on since they were found
        hop.kv_limit = hop.log_limit = NO_TRUNCATION
    recovery.adopt_hops(session, hops)
