"""Which hops there are and how the gateway calls them: made, found again by their blocks, left and closed.

Used by the loop (`recovery.py`) and by planned moves (`moves.py`). A hop that is left before its server told its name
stays here until it does, and is closed then. Knows nothing of epochs, cuts or plans.
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm.protocol.identity import NO_HANDLE, Handle, PeerId
from modelswarm.protocol.messages import Close, FenceAck, Lane, Send
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.sessions.session import Hop, Session


class Hops:
    """Owns the table of reply handles, and counts the hops of each server in the registry."""

    def __init__(
        self, registry: ServerRegistry, draw: Callable[[], int], emit: Callable[[Effect], None]
    ) -> None:
        self._registry = registry
        self._draw = draw
        self._emit = emit
        self.replies: dict[Handle, tuple[Session, Hop]] = {}
        self.leaving: dict[Handle, Hop] = {}  # left before the server told its handle

    def find(self, session: Session, peer: PeerId, first: int, last: int) -> Hop:
        """The hop for these blocks there: one that the session has or is leaving, else a new one."""
        mine = [*session.hops, *session.spare]
        mine += [hop for r, hop in self.leaving.items() if self.replies[r][0] is session]
        for hop in mine:
            if hop.peer == peer and hop.blocks == (first, last):
                return hop
        return self.make(peer, first, last)

    def make(self, peer: PeerId, first: int, last: int) -> Hop:
        server = self._registry.find_server(peer)
        assert server is not None, "a route leads over linked servers only"
        reply = NO_HANDLE
        while reply == NO_HANDLE or reply in self.replies:
            reply = self._draw()
        return Hop(server.address, first, last, reply, zone=server.hello.zone)

    def take(self, session: Session, hop: Hop) -> None:
        """The session has it from now on, as part of its route or beside it."""
        if hop not in session.hops and hop not in session.spare:
            self._registry.add_hop(hop.peer, session.turn.reserved_positions, session.length)
        self.leaving.pop(hop.reply, None)
        self.replies[hop.reply] = (session, hop)

    def leave(self, hop: Hop) -> None:
        self._registry.remove_hop(hop.peer)
        if not self._registry.is_connected(hop.peer):
            self.replies.pop(hop.reply, None)  # Live frees it there when the link returns
        elif hop.own != NO_HANDLE:
            self._close(hop)
            self.replies.pop(hop.reply, None)
        elif hop.asked is None:
            self.replies.pop(hop.reply, None)  # refused, or given up by the server
        else:
            hop.kv_limit = hop.log_limit = (
                0  # cuts do not reach it any more: found again, it begins anew
            )
            self.leaving[hop.reply] = hop

    def never_was(self, hop: Hop) -> None:
        """The server did not open it: nothing is there to close."""
        self._registry.remove_hop(hop.peer)
        self.replies.pop(hop.reply, None)

    def answered(self, hop: Hop, answer: FenceAck) -> bool:
        """False: the answer is of an earlier life of the hop, or of one that was left and is closed now."""
        if answer.epoch < hop.named:
            return False
        if answer.server_handle != NO_HANDLE:
            hop.own, hop.named = answer.server_handle, answer.epoch
        if answer.epoch == hop.asked:
            hop.asked = None
        if hop.reply not in self.leaving:
            return True
        if answer.server_handle != NO_HANDLE:
            self._close(hop)
        elif hop.asked is not None:
            return False  # an earlier create was refused, the last one may yet be granted
        del self.leaving[hop.reply]
        self.replies.pop(hop.reply, None)
        return False

    def lost_link(self, peer: PeerId) -> None:
        """Nothing more will be answered over a lost link."""
        for _, hop in self.replies.values():
            if hop.peer == peer:
                hop.asked = None
        for reply, hop in list(self.leaving.items()):
            if hop.peer == peer:
                del self.leaving[reply]
                self.replies.pop(reply, None)

    def _close(self, hop: Hop) -> None:
        self._emit(Send(hop.server, Lane.LIVE, Close(hop.own)))
