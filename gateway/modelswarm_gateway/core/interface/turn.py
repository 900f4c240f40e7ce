"""One turn: the request, the reason of a refusal, and the state that remains after it.

Used by the core, by `backend/` and by `generation/`. Knows nothing of HTTP, gRPC or text.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from modelswarm.protocol.messages import BlockRange, Sampling, TopLogprob, Turn


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a generated token, and the most probable tokens at its position."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """A session that was opened before its first turn. All of it travels in each turn, so a takeover keeps it."""

    max_length: int  # positions, all of them reserved
    ttl: int  # seconds that it is kept without a turn
    blocks: BlockRange | None = None  # that it runs; None: all, on tokens


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn to run: the whole log it starts from and the limits of its output."""

    tokens: tuple[int, ...]
    max_tokens: int | None  # None: up to the end of the context; 0: prefill only
    sampling: Sampling
    credit_ahead: int = 64  # tokens the swarm may be ahead of the client (R7, credit)
    is_resumed: bool = (
        False  # the client has a part of the answer: held, never refused (I8, honest end)
    )
    begin: int | None = None  # log length at which a resumed turn began; None: all of `tokens`
    keeps_logprobs: bool = False  # with the log, for a stream that is resumed
    reservation: Reservation | None = None  # None: that of the session's turns before
    parent: str = ""  # session whose KV a first turn copies, as far as the logs agree (R15, forks)
    row_bytes: int = 0  # bytes of one returned row (`sampling.returned`)
    opaque: Mapping[int, bytes] = field(default_factory=dict)  # rows of new opaque entries (R14)
    tokenizer: str = ""  # digest of the one that `tokens` are of

    @property
    def only_rows(self) -> bool:
        """True if the turn runs its whole input for the rows of it, and samples nothing."""
        return self.max_tokens == 0 and self.sampling.returned is not None

    @property
    def new_entries(self) -> int | None:
        """Most entries behind the input; None: up to the end of the context.

        With `only_rows` one, which a server that does not know such turns adds to its log.
        """
        return 1 if self.only_rows else self.max_tokens

    def session_length(self, before: Turn) -> int:
        """Return the positions that are reserved for the whole session; 0: only those of its turns."""
        return self.reservation.max_length if self.reservation else before.session_length

    def turn_after(self, before: Turn, begin: int, end: int) -> Turn:
        """Return the turn that follows `before`, with the reservation of the session."""
        whole = self.reservation or Reservation(
            before.session_length, before.session_ttl, before.blocks
        )
        # The last entry of a log needs KV only where its row is read.
        needed = len(self.tokens) if self.only_rows else end - 1
        return Turn(
            max(1, whole.max_length or needed),
            end,
            self.sampling,
            begin,
            whole.max_length,
            whole.ttl,
            whole.blocks,
            only_rows=self.only_rows,
        )


class RefusalReason(enum.Enum):
    """Reason why a turn was refused before its first token, or why a session is held."""

    NO_ROOM = "no_room"  # no free KV: retry later
    NO_SERVERS = "no_servers"  # blocks without a server
    TOO_LONG = "too_long"  # the prompt can never fit
    FAULTS = "faults"  # one route after the other failed


@dataclass(frozen=True, slots=True)
class ParkedTurn:
    """The log of a session that is parked here, and the last turn it ran."""

    tokens: tuple[int, ...]
    turn: Turn
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # by position
    tokenizer: str = ""  # digest of the one that `tokens` are of; "": taken over, so not known

    @property
    def is_empty(self) -> bool:
        """True if the session was opened and has had no turn: its one token only holds the place."""
        return self.turn.session_length > 0 and self.turn.begin == 0
