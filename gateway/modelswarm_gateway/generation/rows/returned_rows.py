"""Rows of logits and hidden states that an answer returns: what a request asks for, and what a chunk carries.

Made by the service for each such answer, used by its generation and by the gRPC API. Knows no servers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelswarm.protocol.messages import ReturnedRows
from modelswarm_gateway.backend.token_stream import RowsEvent
from modelswarm_gateway.core.interface.row_sizes import RowSizes
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.errors import ApiError, Code, invalid_field

# Bytes of rows that are on their way to one client; with the rest of a part, less than gRPC's limit of 4 MiB.
WINDOW_BYTES = 2 << 20
# Most rows, and so tokens, that the servers compute ahead of the client.
MAX_ROWS_AHEAD = 128


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The rows that a request asks for."""

    logits: bool
    hidden_states: bool
    all_positions: bool = False  # of the whole input, not only of its last entry
    after: int | None = None  # the client has the rows below this position

    @property
    def param(self) -> str:
        """Name of the field that asks for them, for errors."""
        return "return_logits" if self.logits else "return_hidden_states"


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of the log entries [start, start + count), each kind row by row."""

    start: int
    count: int
    logits: bytes  # empty if not wanted
    hidden_states: bytes  # empty if not wanted
    sizes: RowSizes


class RowsBuffer:
    """Rows that have come and are in no chunk yet."""

    def __init__(self, wanted: RowOptions, sizes: RowSizes, start: int) -> None:
        self._sizes = sizes
        self._logit_bytes = sizes.logit_bytes * wanted.logits
        self._row_bytes = self._logit_bytes + sizes.hidden_bytes * wanted.hidden_states
        self._rows = bytearray()
        self._start = start

    @property
    def end(self) -> int:
        """Return the position behind the last row that has come."""
        return self._start + len(self._rows) // self._row_bytes

    def put_rows(self, event: RowsEvent) -> None:
        """Take the rows that follow those before."""
        self._rows += event.payload

    def take(self, end: int | None) -> RowBlock | None:
        """Return the rows of entries below `end`, or all; None if there are none."""
        count = (self.end if end is None else min(end, self.end)) - self._start
        if count <= 0:
            return None
        size = self._row_bytes
        taken = bytes(self._rows[: count * size])
        del self._rows[: count * size]
        start, self._start = self._start, self._start + count
        rows = [taken[at : at + size] for at in range(0, len(taken), size)]
        logits = b"".join(row[: self._logit_bytes] for row in rows)
        hidden_states = b"".join(row[self._logit_bytes :] for row in rows)
        return RowBlock(start, count, logits, hidden_states, self._sizes)


def check_rows(wanted: RowOptions | None, sizes: RowSizes) -> None:
    """Raise ApiError if the servers do not return such rows."""
    if wanted is None:
        return
    if not (sizes.logit_bytes or sizes.hidden_bytes):
        detail = "no server that returns rows of this model is linked; retry in 1 s"
        raise ApiError(Code.NO_SERVERS, detail, param=wanted.param, retry_after=1.0)
    for field, is_wanted, size in (
        ("return_logits", wanted.logits, sizes.logit_bytes),
        ("return_hidden_states", wanted.hidden_states, sizes.hidden_bytes),
    ):
        if is_wanted and not size:
            detail = "the servers of this model have none, as it has no weights; leave it out"
            raise ApiError(Code.UNSUPPORTED, f"{field}: {detail}", param=field)


def with_rows(
    turn: TurnRequest, wanted: RowOptions, sizes: RowSizes, start: int, end: int
) -> tuple[TurnRequest, RowsBuffer]:
    """Return the turn that also returns rows, with the credit that their size allows.

    They begin at `start`, or where the client says: at `end` at most, where its rows end. Raise ApiError.
    """
    if wanted.after is not None:
        start = wanted.after
    if start > end:
        detail = f"{start}; allowed: 0 to {end}, because the client has no later rows"
        raise invalid_field("rows_after", detail)
    row_bytes = sizes.logit_bytes * wanted.logits + sizes.hidden_bytes * wanted.hidden_states
    returned = ReturnedRows(start, wanted.logits, wanted.hidden_states)
    made = replace(
        turn,
        sampling=replace(turn.sampling, returned=returned),
        credit_ahead=max(1, min(MAX_ROWS_AHEAD, WINDOW_BYTES // row_bytes)),
        row_bytes=row_bytes,
    )
    return made, RowsBuffer(wanted, sizes, start)
