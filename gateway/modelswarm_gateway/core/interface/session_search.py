"""Results of a search for a session that is not on this gateway (R20, takeover).

Emitted by the core as effects; read by `runtime/session_queries.py` and `generation/session_locator.py`. Plain values.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm.protocol.identity import NO_EPOCH, Epoch, PeerId
from modelswarm.protocol.messages import HopInfo, Turn


@dataclass(frozen=True, slots=True)
class Holder:
    """A server that has a log copy of a session, as it was in that epoch."""

    peer: PeerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What the servers say of a session that is not here."""

    session: str
    epoch: Epoch  # highest that was found
    owner: PeerId = ""  # "": nobody knows the session
    target: str = ""  # of the owner's door
    living: bool = False
    wait: float = 0.0  # seconds until it may be adopted
    ran: Epoch = NO_EPOCH  # the newest that may have generated
    hops: tuple[tuple[PeerId, HopInfo], ...] = ()  # of that epoch and of newer ones
    holders: tuple[Holder, ...] = ()  # of logs of those, the longest first
    unheard: tuple[PeerId, ...] = ()  # servers that may know better, and did not answer
    opener: PeerId = ""  # another gateway is about to open it, and was first somewhere


@dataclass(frozen=True, slots=True)
class Fetched:
    """A log copy has come whole; without a turn: it will not."""

    session: str
    epoch: Epoch  # of the hop that had it
    tokens: tuple[int, ...]
    turn: Turn | None
