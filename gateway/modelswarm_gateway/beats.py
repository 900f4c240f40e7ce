"""When which server is due a Beat of ours (R21): every 100 ms while our routes run there, every 5 s otherwise.

Used by `node.py`, which asks every 50 ms. Whatever was sent to a server counts: all that it learns is that we live.
"""

from __future__ import annotations

from modelswarm.protocol import beats
from modelswarm.protocol.beats import BUSY_SECONDS, IDLE_SECONDS


class BeatTimer(beats.BeatTimer):
    def __init__(self, lease_seconds: float = 30.0) -> None:
        """A lease never ends for want of a beat (R19)."""
        idle = min(IDLE_SECONDS, lease_seconds / 4)
        super().__init__(BUSY_SECONDS, lambda: idle)
