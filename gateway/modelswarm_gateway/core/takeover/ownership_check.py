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


class Absence:
    def __init__(
        self, peer: PeerId, registry: ServerRegistry, emit: Callable[[Effect], None]
    ) -> None:
        """`peer` is this gateway."""
        self._peer, self._registry, self._emit = peer, registry, emit

    def over(self, session: Session) -> None:
        """We slept. A session at rest is asked for when it is used next: there may be thousands. If a turn is in doubt
        since an earlier sleep, that one counts: not all servers may have been reached since."""
        if session.named:
            if session.awake is None:
                session.awake = Epoch(session.epoch.counter + 1, session.epoch.gateway)
            session.asked = False
            if session.in_turn:
                self._ask(session)

    def cut_off(self, session: Session) -> None:
        """A server of its route may hear nothing of us for a lease, and give it to another one. Asked for at the next
        turn; one that runs has its Fences."""
        if session.named and not session.in_turn and session.awake is None:
            session.awake = Epoch(session.epoch.counter + 1, session.epoch.gateway)
            session.asked = False

    def next_turn(self, session: Session) -> None:
        """Once is enough: what is found later may be what a loser left on a server that nobody reached."""
        if session.asked:
            session.awake = None
        elif session.awake is not None:
            self._ask(session)

    def unknown(self, session: Session) -> None:
        """A server has forgotten a hop. If whoever took the session over closed it, hops elsewhere may have been on
        their way when we asked."""
        if self._doubts(session):
            self._ask(session)

    def linked(self, session: Session, server: PeerId) -> None:
        """It may have been out of reach when we asked."""
        if self._doubts(session):
            self._ask_one(session, server)

    def _doubts(self, session: Session) -> bool:
        """It was asked for, and what comes to light later counts too."""
        return session.awake is not None and session.asked

    def _ask(self, session: Session) -> None:
        """Before its Fences, so that most answers come before those to them."""
        session.asked = True
        for server in self._registry:
            if server.hello.model == session.model:
                self._ask_one(session, server.hello.peer)

    def _ask_one(self, session: Session, server: PeerId) -> None:
        self._emit(Send(reply_address(server), Lane.LIVE, FindSession(session.name)))

    def ended(self, session: Session, found: SessionInfo) -> bool:
        """Whether another gateway has it now. Compared with the epoch that we woke with: those that we have come to
        since say nothing about who was first."""
        if session.awake is None or found.owner == self._peer:
            return False
        return bool(found.hops) and found.epoch > session.awake
