"""Ownership check of named sessions after this gateway stalled or lost a link (R19, leases; R20, takeover).

Used by `detection/monitor.py`, which notices stalls, and by `gateway.py`. A Fence only reaches servers that still have
hops of the session. Another gateway may have taken it over and moved it to servers that are not on our route. So all
servers of its model are asked. If another gateway took it over in a higher epoch than ours, this gateway relinquishes
it. Sends FindSession; does not know how a session is searched or taken over.
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
        """Check the session because this gateway stalled.

        A parked session is checked at its next turn: there may be thousands. If an earlier stall is still unresolved,
        its epoch counts: not all servers may have been reached since.
        """
        if session.is_named:
            if session.epoch_after_stall is None:
                session.epoch_after_stall = Epoch(session.epoch.counter + 1, session.epoch.gateway)
            session.ownership_checked = False
            if session.is_in_turn:
                self._ask_servers(session)

    def after_disconnect(self, session: Session) -> None:
        """Check the session at its next turn, because the link to a server of its route broke.

        That server may not hear from us for a whole lease and give the session to another gateway. A running session
        needs no check: its Fences find out.
        """
        if session.is_named and not session.is_in_turn and session.epoch_after_stall is None:
            session.epoch_after_stall = Epoch(session.epoch.counter + 1, session.epoch.gateway)
            session.ownership_checked = False

    def before_turn(self, session: Session) -> None:
        """Ask the servers before the first turn after a stall.

        One check is enough: a later answer may be left over from a gateway that lost the session.
        """
        if session.ownership_checked:
            session.epoch_after_stall = None
        elif session.epoch_after_stall is not None:
            self._ask_servers(session)

    def on_unknown_hop(self, session: Session) -> None:
        """Ask again, because a server has forgotten a hop of the session.

        If the new owner closed it, its own hops may not have existed yet when the servers were asked.
        """
        if self._is_in_doubt(session):
            self._ask_servers(session)

    def on_server_connected(self, session: Session, server: PeerId) -> None:
        """Ask a server that connected: it may have been unreachable when the others were asked."""
        if self._is_in_doubt(session):
            self._ask_server(session, server)

    def _is_in_doubt(self, session: Session) -> bool:
        """True if the servers were asked and later answers still count."""
        return session.epoch_after_stall is not None and session.ownership_checked

    def _ask_servers(self, session: Session) -> None:
        """Ask all servers of the model, before the Fences, so that most answers come before the FenceAcks."""
        session.ownership_checked = True
        for server in self._registry:
            if server.hello.model == session.model:
                self._ask_server(session, server.hello.peer)

    def _ask_server(self, session: Session, server: PeerId) -> None:
        self._emit(Send(reply_address(server), Lane.LIVE, FindSession(session.name)))

    def is_lost(self, session: Session, found: SessionInfo) -> bool:
        """True if another gateway owns the session now.

        Its epoch is compared with our first epoch after the stall: later ones do not tell which gateway was first.
        """
        if session.epoch_after_stall is None or found.owner == self._peer:
            return False
        return bool(found.hops) and found.epoch > session.epoch_after_stall
