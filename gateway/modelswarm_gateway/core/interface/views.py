"""Read-only views of the core's servers and sessions.

Built by `core/snapshots.py`; shown by the API and by metrics. Plain values.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm.protocol.messages import Heartbeat


@dataclass(frozen=True, slots=True)
class ServerView:
    peer: PeerId
    target: str
    model: str
    revision: str
    first: int
    last: int
    n_blocks: int
    own_sessions: int  # hops this gateway has there
    drain_cause: str  # why its sessions are moved elsewhere; empty: they are not
    heartbeat: Heartbeat | None
    suspected: bool = False  # silent
    ejected: bool = False  # gets no new sessions for now, but for one when it is on trial
    score: float = 1.0  # how well it does, in (0, 1]


@dataclass(frozen=True, slots=True)
class HopView:
    peer: PeerId
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SessionView:
    session: str
    model: str
    state: str
    epoch: Epoch
    length: int
    route: tuple[HopView, ...]
    reused: int  # entries that this turn found in the head's KV
    replayed: int  # entries that this turn ran again after faults
    hold_reason: str = ""  # for what it is held
    is_reachable: bool = True  # a server that is linked knows it
