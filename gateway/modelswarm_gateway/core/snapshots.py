"""What the core shows of its servers and sessions to those who only look.

Used by `gateway.py`. Pure.
"""

from __future__ import annotations

from modelswarm_gateway.core.interface.effects import HopView, ServerView, SessionView
from modelswarm_gateway.core.routing.server_registry import Fleet
from modelswarm_gateway.core.servers.server import Server
from modelswarm_gateway.core.sessions.session import Session


def server_view(server: Server, fleet: Fleet, now: float) -> ServerView:
    peer = server.hello.peer
    standing = fleet.standing(peer, now)
    return ServerView(
        peer=peer,
        target=server.hello.target,
        model=server.hello.model,
        revision=server.hello.revision,
        first=server.hello.first,
        last=server.hello.last,
        n_blocks=server.hello.n_blocks,
        own_sessions=fleet.hops[peer],
        leaving=fleet.why_left(peer),
        beat=server.beat,
        suspected=peer in fleet.suspected,
        ejected=standing.ejected,
        score=standing.score,
    )


def session_view(s: Session, fleet: Fleet, waits: str) -> SessionView:
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
        waits=waits,
        seen=any(fleet.linked(hop.peer) for hop in s.hops),
    )
