"""Drain requests (`modelswarm drain`) with several gateways: a request is stored by the drained server itself.

The gateway that is asked tells the server, and the server repeats the request in its heartbeats to all gateways. Each
gateway migrates its own sessions away, whichever was asked. `--undo` works the same way, and a gateway that starts
later learns of the request from the first heartbeat. Used by `gateway.py` and, for the API, by `runtime/drains.py`.
Does not know how sessions are migrated (`migrations.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import DrainState, Heartbeat, Lane, Send, reply_address
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.migration.migrations import Migrations

# The cause of a drain that a user has requested.
DRAIN_CAUSE = "drain"


class DrainRequests:
    def __init__(self, migrations: Migrations, emit: Callable[[Effect], None]) -> None:
        self._migrations, self._emit = migrations, emit
        self._pending: dict[PeerId, DrainState] = {}  # requests that servers have not repeated yet
        self._uncertain: set[PeerId] = set()  # of these, servers that have reconnected since

    def request(self, peer: PeerId, state: DrainState, now: float) -> None:
        """Take a user's request. It is applied here at once, because the server may be silent."""
        self._pending[peer] = state
        self._uncertain.discard(peer)
        self._apply(peer, state, now)
        self._send(peer, state)  # sent last: the server's answer counts the remaining sessions

    def on_heartbeat(self, peer: PeerId, state: DrainState | None, now: float) -> None:
        """Take the request that a server repeats. Until it repeats the pending one, it has not received that yet."""
        pending, uncertain = self._pending.get(peer), peer in self._uncertain
        self._uncertain.discard(peer)
        if pending is not None and state is not pending:
            if not uncertain:
                return
            if state is not DrainState.SERVE:
                self._send(peer, pending)
                return
        if state is None:
            return
        self._pending.pop(peer, None)
        self._apply(peer, state, now)

    def on_reconnected(self, peer: PeerId) -> None:
        """A pending request may be lost, or older than another gateway's: if in doubt, the server is used."""
        if peer in self._pending:
            self._uncertain.add(peer)

    def _send(self, peer: PeerId, state: DrainState) -> None:
        self._emit(Send(reply_address(peer), Lane.LIVE, Heartbeat(drain=state)))

    def is_acknowledged(self, peer: PeerId) -> bool:
        """True if the server has repeated the request, so that the other gateways have received it, too."""
        return peer not in self._pending

    def is_requested(self, peer: PeerId) -> bool:
        return self._migrations.is_draining(peer, DRAIN_CAUSE)

    def _apply(self, peer: PeerId, state: DrainState, now: float) -> None:
        drain = state is DrainState.DRAIN
        if drain is not self.is_requested(peer):
            (self._migrations.drain if drain else self._migrations.undrain)(peer, DRAIN_CAUSE, now)
