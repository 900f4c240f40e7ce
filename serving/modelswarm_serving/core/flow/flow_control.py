"""Flow control of rows: each hop grants its predecessor a window (R11, windows).

Used by `server.py` and `step.py`. A hop grants a window of rows beyond its applied rows. The rows in flight from one
peer to all hops, below their row n, are bounded as well. When a span is lost, hundreds of sessions are replayed over
one link at once. A lane that is sent more than it may queue is closed, with the live rows of all sessions.
Rows from n on need no bound: the ring has one row of a session in flight.
No hop waits for another: each is always granted at least 1/32 of a window, whatever the others use. So a hop is granted
its next rows when its own arrive, and never woken by another hop. Knows nothing of what rows hold.
"""

from __future__ import annotations

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Lane, Window
from modelswarm_serving.core.hops.hop import Hop
from modelswarm_serving.core.hops.outbox import Outbox

MIN_WINDOW_DIVISOR = 32
"""Every hop may have this fraction of a window in flight: 128 KiB, so 1,000 sessions stay far below a lane's queue."""


class FlowControl:
    def __init__(self, out: Outbox, window: int, max_in_flight: int) -> None:
        """`window`: rows of one hop beyond its applied rows. `max_in_flight`: rows of all hops from one peer."""
        self._outbox = out
        self._window = window
        self._min_window = max(1, window // MIN_WINDOW_DIVISOR)
        self._max_in_flight = max_in_flight
        self._in_flight: dict[Hop, tuple[PeerId, int]] = {}  # rows below n: granted, not received
        self._in_flight_from: dict[PeerId, int] = {}  # and their sum

    def grant_window(self, hop: Hop) -> None:
        """Grant the predecessor more rows, if enough; called when rows were received or applied."""
        started = hop.started
        assert started is not None and started.predecessor is not None
        n = started.length - 1
        to = started.predecessor
        if hop in self._in_flight:  # a decoding hop is not
            self._set_in_flight(hop, to.address.peer, min(hop.granted, n) - hop.received)
        limit = min(hop.kv + self._window, hop.turn.reserved_positions)
        # all bulk rows are here: the predecessor may switch to the live lane (R9, one lane at a time)
        acknowledge = hop.received >= n > started.start and not hop.bulk_acknowledged
        # granted in halves of the window; the reserve may cap `granted`, but not the distance
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
        """Forget the rows in flight of a hop that takes no more rows in this epoch."""
        if hop in self._in_flight:
            self._set_in_flight(hop, self._in_flight[hop][0], 0)

    def _max_in_flight_of(self, hop: Hop, peer: PeerId) -> int:
        """Return the rows that this hop may have in flight in all."""
        _, own = self._in_flight.get(hop, (peer, 0))
        return max(self._min_window, own + self._max_in_flight - self._in_flight_from.get(peer, 0))

    def _set_in_flight(self, hop: Hop, peer: PeerId, rows: int) -> None:
        _, before = self._in_flight.pop(hop, (peer, 0))
        if rows > 0:
            self._in_flight[hop] = (peer, rows)
        total = self._in_flight_from.pop(peer, 0) + max(0, rows) - before
        if total:
            self._in_flight_from[peer] = total
