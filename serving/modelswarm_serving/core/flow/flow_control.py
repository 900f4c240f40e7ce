"""How far predecessors may send rows: windows, granted to each by the hop that takes its rows (R11, R12).

Used by `server.py` and `steps.py`. A hop may have a window of rows beyond what it has applied. What all hops together
have coming from one peer below their row n is bounded as well: when a span is lost, hundreds of sessions are replayed
over one link at once, and a lane that is sent more than it may queue ends, with the live rows of everybody. Rows from n
on need no bound: the ring has one of a session under way.
Nobody waits for another: whoever has little still to come is granted a few rows more, whatever the others hold. So
each hop is granted its next rows when its own have come, and no hop is woken by another.
"""

from __future__ import annotations

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Lane, Window
from modelswarm_serving.core.hops.hop import Hop
from modelswarm_serving.core.hops.outbox import Outbox

LEAST_PART = 32
"""Of a window, which every hop may have coming: 64 KiB, so a thousand sessions stay far below what a lane holds."""


class Windows:
    def __init__(self, out: Outbox, window: int, most: int) -> None:
        """`window`: rows of one hop beyond what is applied. `most`: rows of all hops that one peer may have to send."""
        self._out = out
        self._window = window
        self._least = max(1, window // LEAST_PART)
        self._most = most
        self._coming: dict[Hop, tuple[PeerId, int]] = {}  # rows below n that are granted, not here
        self._from: dict[PeerId, int] = {}  # ... and their sum

    def grant(self, hop: Hop) -> None:
        """Rows have come or were applied: tell the predecessor how far it may send, when that is news to it."""
        go = hop.go
        assert go is not None and go.predecessor is not None
        n = go.length - 1
        to = go.predecessor
        if hop in self._coming:  # which one that decodes is not
            self._count(hop, to.address.peer, min(hop.granted, n) - hop.received)
        limit = min(hop.kv + self._window, hop.turn.reserve)
        # all bulk rows are here: the predecessor may go over to live (R9)
        acknowledge = hop.received >= n > go.start and not hop.acknowledged
        # in halves of the window; `granted` may be capped by the reserve, the distance is not
        distance = hop.kv + self._window - hop.granted
        room = limit > hop.granted and distance >= max(1, self._window // 2)
        if room and hop.received < n:
            bound = hop.received + self._may_come(hop, to.address.peer)
            if bound < min(limit, n):
                limit = bound
                room = limit - hop.granted >= max(1, self._least // 2)
        if not (acknowledge or room):
            return
        hop.acknowledged |= acknowledge
        hop.granted = max(hop.granted, limit)
        self._count(hop, to.address.peer, min(hop.granted, n) - hop.received)
        self._out.send(
            to.address, Lane.LIVE, Window(to.handle, go.epoch, hop.received, hop.granted)
        )

    def ended(self, hop: Hop) -> None:
        """It takes no more rows in this epoch."""
        if hop in self._coming:
            self._count(hop, self._coming[hop][0], 0)

    def _may_come(self, hop: Hop, peer: PeerId) -> int:
        """Rows that this hop may have coming in all."""
        _, own = self._coming.get(hop, (peer, 0))
        return max(self._least, own + self._most - self._from.get(peer, 0))

    def _count(self, hop: Hop, peer: PeerId, coming: int) -> None:
        _, before = self._coming.pop(hop, (peer, 0))
        if coming > 0:
            self._coming[hop] = (peer, coming)
        total = self._from.pop(peer, 0) + max(0, coming) - before
        if total:
            self._from[peer] = total
