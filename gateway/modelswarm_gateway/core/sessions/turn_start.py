"""The state of a session at the beginning of a turn: its log, its limits and what it counts.

Used by `gateway.py`. Knows neither servers nor routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelswarm.protocol.opaque import OPAQUE, is_opaque
from modelswarm_gateway.core.interface.errors import CoreError, PromptTooLong
from modelswarm_gateway.core.interface.turn import RefusalReason, TurnRequest
from modelswarm_gateway.core.sessions.prompt_scores import begin_scores
from modelswarm_gateway.core.sessions.returned_rows import begin_rows
from modelswarm_gateway.core.sessions.session import Session, find_fork


def fit_turn(s: Session, request: TurnRequest, context: int) -> int:
    """Return the most entries that the log may have. Raise PromptTooLong."""
    length, limit, holder = len(request.tokens), context, "this model's context"
    reserved = request.session_length(s.turn)
    if 0 < reserved < limit:
        limit, holder = reserved, "this session, by its max_length,"
    if length > limit or (length == limit and request.max_tokens != 0):
        raise PromptTooLong(length, limit, holder)
    return limit


def check_replaceable(s: Session) -> None:
    """Raise CoreError if the session cannot go on with another revision of its model."""
    if s.variant is not None and s.opaque:
        raise CoreError("the model was replaced, and this session has rows of the old one")


def begin_turn(
    s: Session, request: TurnRequest, limit: int, now: float, parent: Session | None = None
) -> None:
    """Set the session's log and limits for a turn.

    `limit`: entries that the log may have. `parent`: the session that a first turn forks from (R15, forks).
    """
    length = len(request.tokens)
    opaque = _opaque_rows(s, request, parent)
    prompt_rows = _count_prompt_rows(opaque, s.boundary_row_bytes)
    s.save_before_turn()
    s.replace_log(request.tokens, opaque)
    s.keeps_logprobs, s.tokenizer = request.keeps_logprobs, request.tokenizer
    if not request.is_resumed:
        s.logprobs = {}
    s.prefill_only = request.new_entries == 0
    end = limit if request.new_entries is None else min(limit, length + request.new_entries)
    begin = length if request.begin is None else request.begin
    turn = request.turn_after(s.turn, begin, end)
    s.turn = replace(turn, adapter=s.adapter, prompt_rows=prompt_rows)
    s.fork = find_fork(s, parent)
    if s.fork is not None and s.fork.parent.ended_at is not None:
        s.fork.parent.ended_at = now  # a Fence would end the copy
    begin_scores(s, request.is_resumed)
    s.turn_number += 1
    s.reused = s.replayed = 0
    s.credit_ahead, s.read_position = max(1, request.credit_ahead), length
    begin_rows(s, request)
    s.record_progress()
    s.is_resumed = request.is_resumed
    s.wanted_positions = s.turn.reserved_positions
    s.excluded.clear()
    s.crowded.clear()
    s.refusal, s.last_fault, s.most_room = RefusalReason.FAULTS, "", None


def _count_prompt_rows(opaque: Mapping[int, bytes], row_bytes: int) -> int:
    """Return the number of entries that the log begins with whose rows have one for each block, too (R14, opaque rows).

    Raise CoreError if other entries have rows, too.
    """
    count = sum(len(row) > row_bytes for row in opaque.values())
    if count and (count < len(opaque) or max(opaque) >= count):
        raise CoreError(
            "rows with block prompts must be the first ones of a log, and the only ones"
        )
    return count


def _opaque_rows(s: Session, request: TurnRequest, parent: Session | None) -> Mapping[int, bytes]:
    """Return the rows of the request's opaque entries (R14): its own, and those of the logs that it continues.

    Raise CoreError if one is missing.
    """
    rows: dict[int, bytes] = {}
    if max(request.tokens) < OPAQUE:
        return rows
    for at, entry in enumerate(request.tokens):
        if not is_opaque(entry):
            continue
        row = request.opaque.get(at)
        for known in (s, parent):
            if row is None and known is not None and known.log[at : at + 1] == [entry]:
                row = known.opaque.get(at)
        if row is None:
            raise CoreError(f"entry {at} of the input is a row that this session does not have")
        rows[at] = row
    return rows
