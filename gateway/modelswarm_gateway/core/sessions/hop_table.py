"""The table of all hops by gateway handle: created, found again by their blocks, detached and closed.

Used by the recovery loop (`recovery/recovery.py`) and by migrations. A hop that is detached before its server sent its
handle stays in the table until the FenceAck comes, and is closed then. Knows nothing of epochs, truncation or plans.
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm.protocol.identity import NO_EPOCH, NO_HANDLE, Handle, PeerId
from modelswarm.protocol.messages import Close, FenceAck, Lane, Send
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.sessions.session import Hop, Session


class HopTable:
    """Owns the gateway handles and keeps the registry's count of hops per server."""

    def __init__(
        self, registry: ServerRegistry, draw: Callable[[], int], emit: Callable[[Effect], None]
    ) -> None:
        self._registry = registry
        self._draw = draw
        self._emit = emit
        self.by_handle: dict[Handle, tuple[Session, Hop]] = {}
        self.closing: dict[Handle, Hop] = {}  # detached before the server sent its handle

    def find_or_create(self, session: Session, peer: PeerId, first: int, last: int) -> Hop:
        """Return the session's hop for these blocks on `peer`, one being closed included; else a new one."""
        mine = session.owned_hops
        mine += [hop for r, hop in self.closing.items() if self.by_handle[r][0] is session]
        for hop in mine:
            if hop.peer == peer and hop.blocks == (first, last):
                return hop
        return self.create_hop(peer, first, last)

    def create_hop(self, peer: PeerId, first: int, last: int, *, kv: int = 0) -> Hop:
        """Return a new hop with an unused handle. It is not in the table until `attach`.

        `kv`: positions that another gateway has left there.
        """
        server = self._registry.find_server(peer)
        assert server is not None, "a route has connected servers only"
        handle = NO_HANDLE
        while handle == NO_HANDLE or handle in self.by_handle:
            handle = self._draw()
        hello = server.hello
        hop = Hop(server.address, first, last, handle, kv_limit=kv, zone=hello.zone)
        hop.grammar_version, hop.numerics = hello.grammar, hello.numerics
        return hop

    def attach(self, session: Session, hop: Hop) -> None:
        """Enter the hop into the table as part of the session's route or beside it."""
        if hop not in session.hops and hop not in session.copy_targets:
            self._registry.add_hop(hop.peer, session.turn.reserved_positions, session.length)
        if hop in session.lost_hops:
            session.lost_hops.remove(hop)
            hop.fence_epoch = NO_EPOCH
        self.closing.pop(hop.gateway_handle, None)
        self.by_handle[hop.gateway_handle] = (session, hop)

    def detach(self, hop: Hop) -> None:
        """Remove the hop from its session and close it."""
        self._registry.remove_hop(hop.peer)
        self.close(hop)

    def close(self, hop: Hop) -> None:
        """Close a hop that is not counted any more on its server, under every handle that its server sends."""
        if not self._registry.is_connected(hop.peer):
            self.by_handle.pop(
                hop.gateway_handle, None
            )  # OwnedSessions frees it there when the link returns
            return
        self._send_close_if_known(hop)
        if hop.create_epoch is None:
            self.by_handle.pop(hop.gateway_handle, None)
        else:
            # Truncations no longer reach it: if it is found again, it must start empty.
            hop.kv_limit = hop.log_limit = 0
            self.closing[hop.gateway_handle] = hop

    def replace(self, session: Session, hop: Hop) -> None:
        """Remove the hop from the session's route. It stays open: it may have the only copy of the log."""
        self._registry.remove_hop(hop.peer)
        hop.truncate(session.length - 1, session.length)
        session.lost_hops.append(hop)

    def record_fence_ack(self, hop: Hop, answer: FenceAck) -> bool:
        """Record the server handle. Return False if the ack is about an earlier creation or a detached hop."""
        if answer.epoch < hop.handle_epoch:
            return False
        if answer.server_handle != NO_HANDLE:
            hop.server_handle, hop.handle_epoch = answer.server_handle, answer.epoch
        if answer.epoch == hop.create_epoch:
            hop.create_epoch = None
        if hop.gateway_handle not in self.closing:
            return True
        self._send_close_if_known(hop)
        if (
            hop.create_epoch is None
        ):  # else the last create may still be granted, with another handle
            del self.closing[hop.gateway_handle]
            self.by_handle.pop(hop.gateway_handle, None)
        return False

    def forget_peer(self, peer: PeerId) -> None:
        """Forget the pending answers of a server whose link broke: none will come."""
        for _, hop in self.by_handle.values():
            if hop.peer == peer:
                hop.create_epoch, hop.fence_epoch = None, NO_EPOCH
        for handle, hop in list(self.closing.items()):
            if hop.peer == peer:
                del self.closing[handle]
                self.by_handle.pop(handle, None)

    def _send_close_if_known(self, hop: Hop) -> None:
        if hop.server_handle != NO_HANDLE:
            self._emit(Send(hop.server, Lane.LIVE, Close(hop.server_handle, hop.is_relinquished)))
            hop.server_handle = NO_HANDLE
