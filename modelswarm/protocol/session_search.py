"""Messages by which a gateway finds a session that another gateway owns or has left (R20, takeover).

Part of `messages.py`, which lists all messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm.protocol.identity import Epoch, PeerId


@dataclass(frozen=True, slots=True)
class FindSession:
    """A gateway asks a server for its hops of a session (R20, takeover)."""

    session: str
    claims: bool = False  # the asking gateway is about to open the session or to take it over
    search_id: int = 0  # id of the search; repeated in the answer


@dataclass(frozen=True, slots=True)
class HopInfo:
    first: int
    last: int
    kv: int
    log: int  # entries of the log copy; 0 where there is none
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """Answers FindSession: the session's owner and its hops here. An unknown session has no hops."""

    session: str
    epoch: Epoch
    owner: PeerId = ""  # the gateway
    target: str = ""  # address of the owner's HTTP API for other gateways, from its Hello
    owner_linked: bool = False  # the link to the owner is up
    owner_silent_ms: float = 0.0  # time since the owner's last message
    lease_ms: float = 0.0  # silence after which a takeover is allowed
    hops: tuple[HopInfo, ...] = ()  # that have followed `last_started`
    last_started: Epoch | None = None  # newest epoch known here to have run; None: none ran
    claimant: PeerId = ""  # another gateway that claimed the session here first
    search_id: int = 0  # of the FindSession
