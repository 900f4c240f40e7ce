"""What others may have done with our named sessions while this process stood still (R19, R20).

Used by `detection.py`, which knows when we slept, and by `gateway.py`. A Fence finds out only where the session still
has hops; whoever took it over may have moved it to servers that we would not ask. So all servers of its model are
asked, and who finds that another gateway has begun to want it after us lets it go, unless our own epoch is the higher.
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm.protocol.messages import FindSession, Lane, Send, SessionInfo, reply_address
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.sessions.session import Session


class OwnershipCheck:
    def __init__(
        self, peer: PeerId, registry: ServerRegistry, emit: Callable[[Effect], None]
    ) -> None:
        """`peer` is this gateway."""
        self._peer, self._registry, self._emit = peer, registry, emit

    def after_stall(self, session: Session) -> None:
        """We slept. A session at rest is asked for when it is used next: there may be thousands. If a turn is in doubt
        since an earlier sleep, that one counts: not all servers may have been reached since."""
        if session.is_named:
            if session.epoch_after_stall is None:
                session.epoch_after_stall = Epoch(session.epoch.counter + 1, session.epoch.gateway)
            session.ownership_checked = False
            if session.is_in_turn:
                self._ask_servers(session)

    def after_disconnect(self, session: Session) -> None:
        """A server of its route may hear nothing of us for a lease, and give it to another one. Asked for at the next
        turn; one that runs has its Fences."""
        if session.is_named and not session.is_in_turn and session.epoch_after_stall is None:
            session.epoch_after_stall = Epoch(session.epoch.counter + 1, session.epoch.gateway)
            session.ownership_checked = False

    def before_turn(self, session: Session) -> None:
        """Once is enough: what is found later may be what a loser left on a server that nobody reached."""
        if session.ownership_checked:
            session.epoch_after_stall = None
        elif session.epoch_after_stall is not None:
            self._ask_servers(session)

    def on_unknown_hop(self, session: Session) -> None:
        """A server has forgotten a hop. If whoever took the session over closed it, hops elsewhere may have been on
        their way when we asked."""
        if self._is_in_doubt(session):
            self._ask_servers(session)

    def on_server_connected(self, session: Session, server: PeerId) -> None:
        """It may have been out of reach when we asked."""
        if self._is_in_doubt(session):
            self._ask_server(session, server)

    def _is_in_doubt(self, session: Session) -> bool:
        """It was asked for, and what comes to light later counts too."""
        return session.epoch_after_stall is not None and session.ownership_checked

    def _ask_servers(self, session: Session) -> None:
        """Before its Fences, so that most answers come before those to them."""
        session.ownership_checked = True
        for server in self._registry:
            if server.hello.model == session.model:
                self._ask_server(session, server.hello.peer)

    def _ask_server(self, session: Session, server: PeerId) -> None:
        self._emit(Send(reply_address(server), Lane.LIVE, FindSession(session.name)))

    def is_lost(self, session: Session, found: SessionInfo) -> bool:
        """Whether another gateway has it now. Compared with the epoch that we woke with: those that we have come to
        since say nothing about who was first."""
        if session.epoch_after_stall is None or found.owner == self._peer:
            return False
        return bool(found.hops) and found.epoch > session.epoch_after_stall
