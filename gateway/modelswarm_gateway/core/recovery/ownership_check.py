"""Ownership check of named sessions that were cut off from servers (R19: leases, R20: ownership).

Another gateway may take a session over while this one is stalled, has lost a link of it, or holds it for half a lease.
The session may then be on servers that are not on our route. So all servers of the model are asked before the next
Fences, and a gateway with a lower rank relinquishes the session. Used by `gateway.py`, the recovery loop and
`detection/monitor.py`. Sends FindSession; does not know how a session is taken over.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from modelswarm.protocol.identity import NO_EPOCH, PeerId
from modelswarm.protocol.messages import FindSession, Lane, Send, SessionInfo, reply_address
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.variant import serves
from modelswarm_gateway.core.sessions.session import OwnershipQuery, Session, SessionState


class OwnershipCheck:
    def __init__(
        self,
        settings: GatewaySettings,
        peer: PeerId,
        registry: ServerRegistry,
        emit: Callable[[Effect], None],
    ) -> None:
        self._settings, self._peer, self._registry, self._emit = settings, peer, registry, emit

    def require(self, session: Session, due_at: float, since: float = math.inf) -> None:
        """Ask before the first Fences after `due_at`. What had run here until the first cut-off is compared.

        `since`: start of a hold or stall. After half a lease, servers that lost their links about then are waited for.
        """
        if session.is_named:
            query = session.query = session.query or OwnershipQuery(session.newest_known_epoch)
            query.due_at, query.since = min(query.due_at, due_at), min(query.since, since)

    def on_link_lost(self, session: Session, now: float) -> None:
        """Ask at once if it is parked, or no linked server has a hop of it: those may all have ended."""
        linked = any(
            self._registry.is_connected(hop.peer) and hop.fence_epoch != NO_EPOCH
            for hop in session.created_hops
        )
        if not (session.is_in_turn and linked):
            self.require(session, now, since=math.inf if linked or not session.is_in_turn else now)
        if session.query is not None and not linked:
            session.query.is_cut_off = True

    def before_turn(self, session: Session) -> None:
        """Ask before this turn. After one check it is enough: a later answer may be of a gateway that lost since."""
        if session.query is not None and session.query.due_at == math.inf:
            session.query = None
        elif session.query is not None:
            session.query.due_at = -math.inf

    def awaits_answers(self, session: Session, now: float) -> bool:
        """True if the session's Fences have to wait. Asks the servers when that is due."""
        query = session.query
        if query is None:
            return False
        if now >= query.due_at:
            settings, half_lease = self._settings, self._settings.lease_seconds / 2
            # No lease protects a first turn that no server knows of: its name is free for other gateways.
            safe = settings.search_seconds if session.last_started is None else half_lease
            is_late = now - query.since >= safe and session.state is not SessionState.FENCING
            # Those that an earlier wait still lacks are waited for, too.
            lost = query.lost & query.unanswered if now < query.until else set()
            if is_late:
                lost_after = query.since - settings.lease_seconds
                lost = lost | self._registry.unlinked_since(session.model, lost_after)
            query.lost, query.unanswered = lost, set(lost)
            if lost:  # asked again at the end: answers from its begin are old then
                query.since = math.inf
                query.due_at = query.until = now + settings.relink_seconds
            else:
                query.until = now + settings.search_seconds
                query.due_at = query.until + half_lease
            self._ask(session, query)
        session.retry_at = query.until
        return self.is_waiting(session, now)

    def on_stall(self, session: Session, seconds: float, now: float) -> None:
        """Wait for missing answers as much longer as this process was stalled: it has read none meanwhile."""
        query = session.query
        if query is None or not query.unanswered or now - seconds >= query.until:
            return
        if query.due_at == query.until:
            query.due_at += seconds
        if session.retry_at == query.until:
            session.retry_at += seconds
        query.until += seconds

    def is_waiting(self, session: Session, now: float) -> bool:
        """True if answers are missing that the session waits for."""
        query = session.query
        return bool(query and now < query.until and query.unanswered - self._registry.suspected)

    def may_create(self, session: Session, peer: PeerId, now: float) -> bool:
        """False if a hop created on `peer` could replace what another gateway has run there."""
        query = session.query
        return query is None or not (peer in query.unanswered or self.is_waiting(session, now))

    def on_start(self, session: Session) -> None:
        """The session runs: only servers that were not reached are still asked."""
        if session.query is not None:
            is_asked = session.query.until > -math.inf
            session.query.due_at = session.query.since = math.inf
            session.query.is_cut_off = False
            session.query = session.query if is_asked else None

    def ask_again(self, session: Session, server: PeerId | None = None) -> None:
        """Ask a server that connects after the check or the cut-off, or all because the owner of a hop may be new."""
        query = session.query
        if query is not None and (query.is_cut_off or query.until > -math.inf):
            self._ask(session, query, server)

    def _ask(self, session: Session, query: OwnershipQuery, only: PeerId | None = None) -> None:
        servers = self._registry if only is None else (self._registry.find_server(only),)
        for server in servers:
            if server is not None and serves(server.hello, session.model):
                peer = server.hello.peer
                query.unanswered.add(peer)
                self._emit(Send(reply_address(peer), Lane.LIVE, FindSession(session.name)))

    def is_lost(self, session: Session, peer: PeerId, found: SessionInfo) -> bool:
        """Record an answer. True if another gateway owns the session now, or has run it since the cut-off."""
        query = session.query
        if query is None:
            return False
        query.unanswered.discard(peer)
        ran = found.last_started or NO_EPOCH
        ran_elsewhere = ran > query.newest_run_epoch and ran.gateway != session.epoch.gateway
        is_other = bool(found.hops) and found.owner != self._peer
        return is_other and (ran_elsewhere or (ran, found.epoch) > session.rank)
