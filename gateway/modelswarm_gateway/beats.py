"""When which server is due a Beat of ours (R21): every second while our routes run there, every 5 s otherwise.

Used by `node.py`, which asks every 50 ms. Whatever was sent to a server counts: all that it learns is that we live, and
all it does with that is to count leases (R19), so it need not hear it more often than a lease's eighth. Each Beat
takes a server's loop and engine some tenths of a millisecond from the rows.
"""

from __future__ import annotations

from modelswarm.protocol import heartbeat
from modelswarm.protocol.heartbeat import IDLE_SECONDS

BUSY_SECONDS = 1.0


class BeatTimer(heartbeat.BeatTimer):
    def __init__(self, lease_seconds: float = 30.0) -> None:
        """A lease never ends for want of a beat (R19)."""
        idle = min(IDLE_SECONDS, lease_seconds / 4)
        super().__init__(min(BUSY_SECONDS, lease_seconds / 8), lambda: idle)
