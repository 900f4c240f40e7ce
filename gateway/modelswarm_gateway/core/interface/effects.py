"""What goes into and comes out of the gateway core, besides protocol items: settings, requests, effects, views.

The node (shell) executes effects in order; the doors see only Emitted, Refused and Broken.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from modelswarm.protocol.identity import NO_EPOCH, Epoch, PeerId
from modelswarm.protocol.messages import Beat, Finish, FoundHop, Sampling, Send, Turn


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    hold_seconds: float = 60.0  # a session that cannot run waits so long for servers or room
    silent_seconds: float = 0.3  # silence of a server on a live route that is never suspicious
    overdue_seconds: float = 1.0  # ... and what its servers' steps take: a token is due
    answer_seconds: float = 0.3  # ... and its longest step: a hop's answer to a Fence is due
    fenced_seconds: float = 5.0  # it is waited for so long if there is no way around it
    dead_seconds: float = 15.0  # silence of any server, three idle beats: its link is closed
    lease_seconds: float = 30.0  # the servers' (R19): half of it asleep, and all is fenced anew
    retry_seconds: float = 0.1  # first pause of a held session; doubles up to retry_limit_seconds
    retry_limit_seconds: float = 2.0
    pair_seconds: float = 30.0  # a pair of servers that failed twice in it is avoided for as long
    loops_without_token: int = 10  # this many loops without a new token (R21): held
    give_up_kv_after: int = 3  # a held session frees its KV elsewhere after so many tries (R12)
    copies_per_server: int = 8  # planned moves that a server has a part in at a time (R13)
    copy_seconds: float = 5.0  # a copy that gets no nearer for so long is dropped
    copy_tries: int = 3  # after so many failed copies, a session is moved without one
    rebalance_seconds: float = 60.0  # a server with too many sessions gives some away; 0: off
    move_seconds: float = 0.5  # pause after a failed move; doubles with each
    affinity_seconds: float = 2.0  # a new turn waits no longer for a server that others can replace
    contend_seconds: float = 0.4  # for another gateway with a lower epoch to let go of a session
    find_seconds: float = 0.3  # to hear from all servers what they hold of a session (R20)
    fetch_seconds: float = 10.0  # for a log copy to come whole
    input_tokens: int = 8192  # most log entries per Input message
    short_input: int = 256  # up to here an Input goes on live: cheaper than waking the bulk lane


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn: the whole log it starts from and what to add to it."""

    tokens: tuple[int, ...]
    max_tokens: int | None  # None: up to the context's end; 0: only read
    sampling: Sampling
    credit_ahead: int = 64  # tokens the swarm may be ahead of the reader (R7)
    begun: bool = False  # its client has a part of the answer: it waits and is not refused (I8)


class Why(enum.Enum):
    """Why a turn was refused before its first token, or waits."""

    NO_ROOM = "no_room"  # no free KV: try later
    NO_SERVERS = "no_servers"  # blocks without a server
    TOO_LONG = "too_long"  # the prompt can never fit
    FAULTS = "faults"  # its routes break, one after the other


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
    why: Why
    detail: str
    retry_after: float  # seconds


@dataclass(frozen=True, slots=True)
class Broken:
    """The session could not be saved (I8); it is closed."""

    session: str
    detail: str


@dataclass(frozen=True, slots=True)
class Outranked:
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
class Moved:
    """A planned move of a session away from `peer` ended (R13); for logs and metrics."""

    session: str
    peer: PeerId
    why: str
    outcome: str  # of `move.Ended`
    seconds: float


@dataclass(frozen=True, slots=True)
class Unlink:
    """A server has been silent for so long that its link is to be closed, and dialled anew."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Ejected:
    """A server gets no new sessions for a while; for logs and metrics."""

    peer: PeerId
    model: str
    cause: str  # silent, overdue, failed, slow


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
    hops: tuple[tuple[PeerId, FoundHop], ...] = ()  # of that epoch and of newer ones
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


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """The log of a session that is parked here, and the turn that it ran last."""

    tokens: tuple[int, ...]
    turn: Turn


Effect: TypeAlias = (
    Send
    | Emitted
    | Refused
    | Broken
    | Outranked
    | Rerouted
    | Resumed
    | Moved
    | Ejected
    | Unlink
    | Whereabouts
    | Fetched
)


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
    leaving: str  # why its sessions are moved elsewhere; empty: they are not
    beat: Beat | None
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
    waits: str = ""  # for what it is held
    seen: bool = True  # a server that is linked knows it


class CoreError(Exception):
    """A call that the core cannot take; the message is for the client."""


class UnknownSession(CoreError):
    pass


class SessionBusy(CoreError):
    pass


class PromptTooLong(CoreError):
    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"the prompt has {length} tokens; this model's context holds {limit}")
        self.length, self.limit = length, limit
