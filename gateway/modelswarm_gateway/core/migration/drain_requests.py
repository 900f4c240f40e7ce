"""`modelswarm drain` with several gateways: which servers are to be left is kept by the servers themselves.

A gateway that is asked tells the server, and the server tells all gateways in its Beats, so each moves its own sessions
away, whichever was asked; so does `--undo`, and a gateway that comes later hears of it from the first Beat. Used by
`gateway.py` and, for the doors, `drains.py`. How sessions are moved is `moves.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import DrainState, Heartbeat, Lane, Send, reply_address
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.migration.migrations import Migrations

DRAIN_CAUSE = "drain"  # the cause


class DrainRequests:
    def __init__(self, migrations: Migrations, emit: Callable[[Effect], None]) -> None:
        self._migrations, self._emit = migrations, emit
        self._pending: dict[PeerId, DrainState] = {}  # what servers have not repeated yet
        self._uncertain: set[PeerId] = set()  # of these, those that were told on another link

    def request(self, peer: PeerId, wish: DrainState, now: float) -> None:
        """Somebody asked this gateway. It counts here at once: its server may be silent."""
        self._pending[peer] = wish
        self._uncertain.discard(peer)
        self._apply(peer, wish, now)
        self._send(peer, wish)  # the last word: its answer counts the sessions that are left

    def on_heartbeat(self, peer: PeerId, wish: DrainState | None, now: float) -> None:
        """What a server says was wished last. Until it repeats what it was told, it speaks of what was before."""
        told, unsure = self._pending.get(peer), peer in self._uncertain
        self._uncertain.discard(peer)
        if told is not None and wish is not told:
            if not unsure:
                return
            if wish is not DrainState.SERVE:
                self._send(peer, told)
                return
        if wish is None:
            return
        self._pending.pop(peer, None)
        self._apply(peer, wish, now)

    def on_peer_connected(self, peer: PeerId) -> None:
        """What was on its way to it may be lost, or older than what others told it: in doubt it is to be used."""
        if peer in self._pending:
            self._uncertain.add(peer)

    def _send(self, peer: PeerId, wish: DrainState) -> None:
        self._emit(Send(reply_address(peer), Lane.LIVE, Heartbeat(drain=wish)))

    def is_acknowledged(self, peer: PeerId) -> bool:
        """Whether the server has repeated what it was told: so its other gateways have been told, too."""
        return peer not in self._pending

    def is_requested(self, peer: PeerId) -> bool:
        return self._migrations.is_draining(peer, DRAIN_CAUSE)

    def _apply(self, peer: PeerId, wish: DrainState, now: float) -> None:
        leave = wish is DrainState.DRAIN
        if leave is not self.is_requested(peer):
            (self._migrations.drain if leave else self._migrations.undrain)(peer, DRAIN_CAUSE, now)
