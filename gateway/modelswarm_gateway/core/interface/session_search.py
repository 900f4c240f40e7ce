"""Results of a search for a session that is not on this gateway (R20, takeover).

Emitted by the core as effects; read by `runtime/session_queries.py` and `generation/session_locator.py`. Plain values.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm.protocol.identity import NO_EPOCH, Epoch, PeerId
from modelswarm.protocol.messages import HopInfo, Turn


@dataclass(frozen=True, slots=True)
class LogHolder:
    """A server that has a log copy of a session, as it was in that epoch."""

    peer: PeerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SessionLocation:
    """What the servers say of a session that is not here."""

    session: str
    epoch: Epoch  # highest that was found
    owner: PeerId = ""  # "": nobody knows the session
    owner_target: str = ""  # of the owner's door
    is_owner_alive: bool = False
    takeover_wait: float = 0.0  # seconds until it may be adopted
    last_started: Epoch = NO_EPOCH  # the newest that may have generated
    hops: tuple[tuple[PeerId, HopInfo], ...] = ()  # of that epoch and of newer ones
    log_holders: tuple[LogHolder, ...] = ()  # of logs of those, the longest first
    unanswered: tuple[PeerId, ...] = ()  # servers that may know better, and did not answer
    claimant: PeerId = ""  # another gateway is about to open it, and was first somewhere


@dataclass(frozen=True, slots=True)
class FetchedLog:
    """A log copy has come whole; without a turn: it will not."""

    session: str
    epoch: Epoch  # of the hop that had it
    tokens: tuple[int, ...]
    turn: Turn | None
