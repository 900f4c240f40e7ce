"""Results of a search for a session that is not on this gateway (R20, takeover).

Emitted by the core as effects; read by `runtime/session_queries.py` and `generation/session_locator.py`. Plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelswarm.protocol.identity import NO_EPOCH, Epoch, PeerId
from modelswarm.protocol.messages import HopInfo, Turn


@dataclass(frozen=True, slots=True)
class LogHolder:
    """A server with a log copy of a session, as of that epoch."""

    peer: PeerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SessionLocation:
    """The servers' answers about a session that is not on this gateway."""

    session: str
    epoch: Epoch  # highest epoch found
    owner: PeerId = ""  # "": no server knows the session
    owner_target: str = ""  # address of the owner's API
    is_owner_alive: bool = False
    takeover_wait: float = 0.0  # seconds until it may be taken over
    last_started: Epoch = NO_EPOCH  # the newest epoch that may have generated tokens
    hops: tuple[tuple[PeerId, HopInfo], ...] = ()  # hops of that epoch and of newer ones
    log_holders: tuple[LogHolder, ...] = ()  # holders of their logs, the longest log first
    unanswered: tuple[PeerId, ...] = ()  # servers that did not answer and may know more
    claimant: PeerId = ""  # another gateway that claimed the name first on some server


@dataclass(frozen=True, slots=True)
class FetchedLog:
    """A complete log copy. If `turn` is None, the fetch failed."""

    session: str
    epoch: Epoch  # of the hop that held it
    tokens: tuple[int, ...]
    turn: Turn | None
    opaque: Mapping[int, bytes] = field(default_factory=dict)  # rows of opaque entries, by position
