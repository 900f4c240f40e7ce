"""When which gateway is due a Beat of ours (R21): every 100 ms while sessions of its run here, every 5 s otherwise.

Used by `node.py`, which asks every BUSY_SECONDS: whoever would hear nothing for longer than is promised until then is
due now. Where data flow, they are the signs of life; then a Beat goes every half second, for what it says of free
pages, load and steps.
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm.protocol import heartbeat
from modelswarm.protocol.heartbeat import BUSY_SECONDS, IDLE_SECONDS

STATUS_SECONDS = 0.5


class BeatTimer(heartbeat.BeatTimer):
    def __init__(self, jitter: Callable[[], float], busy_seconds: float = BUSY_SECONDS) -> None:
        """`jitter` gives numbers in [0, 1): idle beats of many servers do not come at once."""
        early = BUSY_SECONDS / 2
        super().__init__(
            busy_seconds - early,
            lambda: IDLE_SECONDS * (0.75 + 0.25 * jitter()),
            max(STATUS_SECONDS, busy_seconds) - early,
        )
