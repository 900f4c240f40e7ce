"""Rows of logits and hidden states, returned by the tail: the position up to which the gateway has them.

Used by `gateway.py`, `turn_start.py` and the recovery loop. After a fault the tail is truncated to the first row that
is missing. So replay (R6) brings exactly the missing rows, and each one reaches the client once.
"""

from __future__ import annotations

from dataclasses import replace

from modelswarm.protocol.messages import Rows, Sampling
from modelswarm_gateway.core.interface.effects import RowsReturned
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.core.sessions.session import NO_TRUNCATION, Session


def begin_rows(session: Session, request: TurnRequest) -> None:
    """Prepare a new turn. With max_tokens 0 it has no parameters of tokens."""
    returned = request.sampling.returned
    session.next_row = 0 if returned is None else returned.start
    session.row_bytes = request.row_bytes
    if request.only_rows:
        plain = Sampling(returned=returned, prompt_logprobs=request.sampling.prompt_logprobs)
        session.turn = replace(session.turn, sampling=plain)
    if returned is not None:
        session.read_position = returned.start


def truncate_missing(session: Session) -> None:
    """Let the tail run every row again that is missing. Tails that are created later return no other ones."""
    returned = session.turn.sampling.returned
    if returned is None or session.variant is None:
        return
    for hop in session.owned_hops:
        if hop.last == session.blocks[1]:
            hop.truncate(session.next_row, NO_TRUNCATION)
    sampling = replace(session.turn.sampling, returned=replace(returned, start=session.next_row))
    session.turn = replace(session.turn, sampling=sampling)


def take_rows(session: Session, item: Rows) -> RowsReturned | None:
    """Take what is new. `item.first` is at most the position that is expected."""
    known = session.next_row - item.first
    if known >= item.count:
        return None
    payload = bytes(item.payload[known * session.row_bytes :])
    first, session.next_row = session.next_row, item.first + item.count
    session.result_groups += 1
    return RowsReturned(session.name, first, payload)
