"""What the core shows of its servers and sessions to those who only look.

Used by `gateway.py`. Pure.
"""

from __future__ import annotations

from modelswarm_gateway.core.interface.views import HopView, ServerView, SessionView
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.server import Server
from modelswarm_gateway.core.sessions.session import Session


def server_view(server: Server, registry: ServerRegistry, now: float) -> ServerView:
    peer = server.hello.peer
    standing = registry.health_status(peer, now)
    return ServerView(
        peer=peer,
        target=server.hello.target,
        model=server.hello.model,
        revision=server.hello.revision,
        first=server.hello.first,
        last=server.hello.last,
        n_blocks=server.hello.n_blocks,
        own_sessions=registry.hops[peer],
        drain_cause=registry.drains.first_cause(peer),
        heartbeat=server.heartbeat,
        suspected=peer in registry.suspected,
        ejected=standing.ejected,
        score=standing.score,
    )


def session_view(s: Session, registry: ServerRegistry, waits: str) -> SessionView:
    """`waits`: what it is held for."""
    return SessionView(
        session=s.name,
        model=s.model,
        state=s.state.value,
        epoch=s.epoch,
        length=s.length,
        route=tuple(HopView(hop.peer, hop.first, hop.last) for hop in s.hops),
        reused=s.reused,
        replayed=s.replayed,
        hold_reason=waits,
        is_reachable=any(registry.is_connected(hop.peer) for hop in s.hops),
    )
