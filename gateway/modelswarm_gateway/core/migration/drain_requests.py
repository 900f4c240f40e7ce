"""`modelswarm drain` with several gateways: which servers are to be left is kept by the servers themselves.

A gateway that is asked tells the server, and the server tells all gateways in its Beats, so each moves its own sessions
away, whichever was asked; so does `--undo`, and a gateway that comes later hears of it from the first Beat. Used by
`gateway.py` and, for the doors, `drains.py`. How sessions are moved is `moves.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Beat, Lane, Send, Wish, reply_address
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.migration.migrations import Moves

DRAIN = "drain"  # the cause


class Wishes:
    def __init__(self, moves: Moves, emit: Callable[[Effect], None]) -> None:
        self._moves, self._emit = moves, emit
        self._told: dict[PeerId, Wish] = {}  # what servers have not repeated yet
        self._unsure: set[PeerId] = set()  # of these, those that were told on another link

    def tell(self, peer: PeerId, wish: Wish, now: float) -> None:
        """Somebody asked this gateway. It counts here at once: its server may be silent."""
        self._told[peer] = wish
        self._unsure.discard(peer)
        self._follow(peer, wish, now)
        self._say(peer, wish)  # the last word: its answer counts the sessions that are left

    def heard(self, peer: PeerId, wish: Wish | None, now: float) -> None:
        """What a server says was wished last. Until it repeats what it was told, it speaks of what was before."""
        told, unsure = self._told.get(peer), peer in self._unsure
        self._unsure.discard(peer)
        if told is not None and wish is not told:
            if not unsure:
                return
            if wish is not Wish.STAY:
                self._say(peer, told)
                return
        if wish is None:
            return
        self._told.pop(peer, None)
        self._follow(peer, wish, now)

    def linked(self, peer: PeerId) -> None:
        """What was on its way to it may be lost, or older than what others told it: in doubt it is to be used."""
        if peer in self._told:
            self._unsure.add(peer)

    def _say(self, peer: PeerId, wish: Wish) -> None:
        self._emit(Send(reply_address(peer), Lane.LIVE, Beat(wish=wish)))

    def known(self, peer: PeerId) -> bool:
        """Whether the server has repeated what it was told: so its other gateways have been told, too."""
        return peer not in self._told

    def leaves(self, peer: PeerId) -> bool:
        return self._moves.leaves(peer, DRAIN)

    def _follow(self, peer: PeerId, wish: Wish, now: float) -> None:
        leave = wish is Wish.LEAVE
        if leave is not self.leaves(peer):
            (self._moves.leave if leave else self._moves.stay)(peer, DRAIN, now)
