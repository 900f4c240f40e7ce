"""Builds the read-only views of servers and sessions, and the list of hops for a server.

Used by `gateway.py`. Pure; knows neither API nor metrics.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelswarm.protocol.identity import NO_HANDLE, PeerId
from modelswarm.protocol.messages import OwnedSession, OwnedSessions
from modelswarm_gateway.core.interface.views import HopView, ServerView, SessionView
from modelswarm_gateway.core.recovery.refusals import explain_refusal
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.server import Server
from modelswarm_gateway.core.sessions.session import Session, SessionState


def owned_sessions(sessions: Iterable[Session], peer: PeerId) -> OwnedSessions:
    """Return all hops of these sessions at a server."""
    hops = ((session, hop) for session in sessions for hop in session.owned_hops)
    return OwnedSessions(
        tuple(
            OwnedSession(session.name, hop.server_handle, session.epoch)
            for session, hop in hops
            if hop.peer == peer and hop.server_handle != NO_HANDLE
        )
    )


def server_view(server: Server, registry: ServerRegistry, now: float) -> ServerView:
    """Return the view of a server."""
    peer = server.hello.peer
    status = registry.health_status(peer, now)
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
        ejected=status.ejected,
        score=status.score,
        numerics=server.hello.numerics,
        dtype=server.hello.dtype,
    )


def session_view(s: Session, registry: ServerRegistry) -> SessionView:
    """Return the view of a session."""
    held = s.state is SessionState.HELD
    return SessionView(
        session=s.name,
        model=s.model,
        state=s.state.value,
        epoch=s.epoch,
        length=s.length,
        route=tuple(HopView(hop.peer, hop.first, hop.last) for hop in s.hops),
        reused=s.reused,
        replayed=s.replayed,
        reroutes=s.reroutes,
        hold_reason=explain_refusal(registry, s, s.refusal) if held else "",
        is_reachable=any(registry.is_connected(hop.peer) for hop in s.hops)
        and not (s.query and s.query.is_cut_off),
        newest_run_epoch=s.newest_run_epoch,
        waits_for_reader=s.waits_for_reader,
        wanted_positions=s.wanted_positions,
        crowded_servers=frozenset(s.crowded),
    )
