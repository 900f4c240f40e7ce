"""Effects: everything that the gateway core asks its shell to do or to report.

Emitted by the core and executed in order by `runtime/node.py`. Streams of the API get Emitted, PromptScored,
RowsReturned, Refused, SessionLost and OwnershipLost. The effects that say "for logs and metrics" change nothing. Plain
values that know no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Finish, PromptLogprob, Send, Token, TopLogprob
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.interface.turn import RefusalReason


@dataclass(frozen=True, slots=True)
class Emitted:
    """The log entry at `position`, once and in order (I3, order). token == -1: the turn samples nothing."""

    session: str
    position: int
    token: int
    logprob: float
    finish: Finish
    top: tuple[TopLogprob, ...] = ()


def emitted_group(session: str, token: Token) -> list[Emitted]:
    """Return the entries of a Token. Forced entries have no log probability.

    A turn that reports log probabilities has no forced entries.
    """
    group = [
        Emitted(session, position, entry, 0.0, Finish.NONE)
        for position, entry in enumerate(token.group, token.position)
    ]
    group[0] = replace(group[0], logprob=token.logprob, top=token.top)
    group[-1] = replace(group[-1], finish=token.finish)
    return group


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of the prompt's entries from `start` on: each once, in order, before the first Emitted."""

    session: str
    start: int
    entries: tuple[PromptLogprob, ...]


@dataclass(frozen=True, slots=True)
class RowsReturned:
    """Returned rows of the log entries from `start` on: each once, in order, before the entry after it is emitted."""

    session: str
    start: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """A turn that did not start; its session is parked and still open."""

    session: str
    reason: RefusalReason
    detail: str
    retry_after: float  # seconds


@dataclass(frozen=True, slots=True)
class SessionLost:
    """A session that could not be recovered (I8, honest end); it is closed."""

    session: str
    detail: str
    repeats: bool = False  # the same request would fail again, at any server


@dataclass(frozen=True, slots=True)
class OwnershipLost:
    """A session that another gateway owns (R20, takeover): closed here, without further effects."""

    session: str


@dataclass(frozen=True, slots=True)
class Rerouted:
    """A running session that entered the recovery loop because of a fault; for logs and metrics."""

    session: str
    cause: str
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Resumed:
    """The first new token after Rerouted; for logs and metrics."""

    session: str
    seconds: float


@dataclass(frozen=True, slots=True)
class MigrationEnded:
    """The end of a migration away from `peer` (R13, migration); for logs and metrics."""

    session: str
    peer: PeerId
    cause: str
    outcome: str  # value of a MigrationOutcome
    seconds: float


@dataclass(frozen=True, slots=True)
class GrammarVersionChanged:
    """A session that goes on with another version of the grammar's library; for logs and metrics."""

    session: str
    peer: PeerId  # its tail
    before: str
    now: str


@dataclass(frozen=True, slots=True)
class NumericsChanged:
    """A session with blocks that go on in another numerics class; for logs and metrics."""

    session: str
    peer: PeerId  # the server that runs them now
    before: str
    now: str  # empty: unknown


@dataclass(frozen=True, slots=True)
class CloseLink:
    """A link to close and dial again, because its server has been silent for too long."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Ejected:
    """A server that gets no new sessions for a while; for logs and metrics."""

    peer: PeerId
    model: str
    cause: str  # silent, overdue, failed, slow


Effect: TypeAlias = (
    Send
    | Emitted
    | PromptScored
    | RowsReturned
    | Refused
    | SessionLost
    | OwnershipLost
    | Rerouted
    | Resumed
    | MigrationEnded
    | GrammarVersionChanged
    | NumericsChanged
    | Ejected
    | CloseLink
    | SessionLocation
    | FetchedLog
)
