"""One turn as the core is given it, keeps it and refuses it.

Used by the core, by `backend/` and by `generation/`. Knows nothing of HTTP, gRPC or text.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from modelswarm.protocol.messages import Sampling, Turn


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn: the whole log it starts from and what to add to it."""

    tokens: tuple[int, ...]
    max_tokens: int | None  # None: up to the context's end; 0: only read
    sampling: Sampling
    credit_ahead: int = 64  # tokens the swarm may be ahead of the reader (R7)
    is_resumed: bool = (
        False  # its client has a part of the answer: it waits and is not refused (I8)
    )


class RefusalReason(enum.Enum):
    """Why a turn was refused before its first token, or waits."""

    NO_ROOM = "no_room"  # no free KV: try later
    NO_SERVERS = "no_servers"  # blocks without a server
    TOO_LONG = "too_long"  # the prompt can never fit
    FAULTS = "faults"  # its routes break, one after the other


@dataclass(frozen=True, slots=True)
class ParkedTurn:
    """The log of a session that is parked here, and the turn that it ran last."""

    tokens: tuple[int, ...]
    turn: Turn
