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

MIN_WINDOW_DIVISOR = 32
"""Of a window, which every hop may have coming: 64 KiB, so a thousand sessions stay far below what a lane holds."""


class FlowControl:
    def __init__(self, out: Outbox, window: int, max_in_flight: int) -> None:
        """`window`: rows of one hop beyond what is applied. `most`: rows of all hops that one peer may have to send."""
        self._outbox = out
        self._window = window
        self._min_window = max(1, window // MIN_WINDOW_DIVISOR)
        self._max_in_flight = max_in_flight
        self._in_flight: dict[
            Hop, tuple[PeerId, int]
        ] = {}  # rows below n that are granted, not here
        self._in_flight_from: dict[PeerId, int] = {}  # ... and their sum

    def grant_window(self, hop: Hop) -> None:
        """Rows have come or were applied: tell the predecessor how far it may send, when that is news to it."""
        started = hop.started
        assert started is not None and started.predecessor is not None
        n = started.length - 1
        to = started.predecessor
        if hop in self._in_flight:  # which one that decodes is not
            self._set_in_flight(hop, to.address.peer, min(hop.granted, n) - hop.received)
        limit = min(hop.kv + self._window, hop.turn.reserved_positions)
        # all bulk rows are here: the predecessor may go over to live (R9)
        acknowledge = hop.received >= n > started.start and not hop.bulk_acknowledged
        # in halves of the window; `granted` may be capped by the reserve, the distance is not
        distance = hop.kv + self._window - hop.granted
        room = limit > hop.granted and distance >= max(1, self._window // 2)
        if room and hop.received < n:
            bound = hop.received + self._max_in_flight_of(hop, to.address.peer)
            if bound < min(limit, n):
                limit = bound
                room = limit - hop.granted >= max(1, self._min_window // 2)
        if not (acknowledge or room):
            return
        hop.bulk_acknowledged |= acknowledge
        hop.granted = max(hop.granted, limit)
        self._set_in_flight(hop, to.address.peer, min(hop.granted, n) - hop.received)
        self._outbox.send(
            to.address, Lane.LIVE, Window(to.handle, started.epoch, hop.received, hop.granted)
        )

    def remove_hop(self, hop: Hop) -> None:
        """It takes no more rows in this epoch."""
        if hop in self._in_flight:
            self._set_in_flight(hop, self._in_flight[hop][0], 0)

    def _max_in_flight_of(self, hop: Hop, peer: PeerId) -> int:
        """Rows that this hop may have coming in all."""
        _, own = self._in_flight.get(hop, (peer, 0))
        return max(self._min_window, own + self._max_in_flight - self._in_flight_from.get(peer, 0))

    def _set_in_flight(self, hop: Hop, peer: PeerId, rows: int) -> None:
        _, before = self._in_flight.pop(hop, (peer, 0))
        if rows > 0:
            self._in_flight[hop] = (peer, rows)
        total = self._in_flight_from.pop(peer, 0) + max(0, rows) - before
        if total:
            self._in_flight_from[peer] = total
