"""What goes into and comes out of the gateway core, besides protocol items: settings, requests, effects, views.

The node (shell) executes effects in order; the doors see only Emitted, Refused and Broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Finish, Send
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.interface.turn import RefusalReason


@dataclass(frozen=True, slots=True)
class Emitted:
    """Log entry `position`, once and in order (I3). token == -1: nothing was to be sampled."""

    session: str
    position: int
    token: int
    logprob: float
    finish: Finish


@dataclass(frozen=True, slots=True)
class Refused:
    """The turn did not start; the session is parked and still open."""

    session: str
    reason: RefusalReason
    detail: str
    retry_after: float  # seconds


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session could not be saved (I8); it is closed."""

    session: str
    detail: str


@dataclass(frozen=True, slots=True)
class OwnershipLost:
    """Another gateway has the session (R20): it is closed here, and nothing more is said about it."""

    session: str


@dataclass(frozen=True, slots=True)
class Rerouted:
    """A fault made a running session enter the loop; for logs and metrics."""

    session: str
    cause: str
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Resumed:
    """First new token after Rerouted."""

    session: str
    seconds: float


@dataclass(frozen=True, slots=True)
class MigrationEnded:
    """A planned move of a session away from `peer` ended (R13); for logs and metrics."""

    session: str
    peer: PeerId
    cause: str
    outcome: str  # of `move.Ended`
    seconds: float


@dataclass(frozen=True, slots=True)
class CloseLink:
    """A server has been silent for so long that its link is to be closed, and dialled anew."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Ejected:
    """A server gets no new sessions for a while; for logs and metrics."""

    peer: PeerId
    model: str
    cause: str  # silent, overdue, failed, slow


Effect: TypeAlias = (
    Send
    | Emitted
    | Refused
    | SessionLost
    | OwnershipLost
    | Rerouted
    | Resumed
    | MigrationEnded
    | Ejected
    | CloseLink
    | SessionLocation
    | FetchedLog
)
