"""Returned rows and scores of a prompt that a session takes: what is new, once."""

from __future__ import annotations

from modelswarm.protocol.identity import Epoch
from modelswarm.protocol.messages import PromptLogprobs, ReturnedRows, Rows, Sampling, Turn
from modelswarm.protocol.sampling import PromptLogprob
from modelswarm_gateway.core.interface.effects import PromptScored, RowsReturned
from modelswarm_gateway.core.sessions.prompt_scores import take_scores
from modelswarm_gateway.core.sessions.returned_rows import take_rows
from modelswarm_gateway.core.sessions.session import Session

EPOCH = Epoch(1, 1)
ROW_BYTES = 2


def make_session(sampling: Sampling) -> Session:
    turn = Turn(reserved_positions=16, end=16, begin=5, sampling=sampling)
    return Session("a", "m", EPOCH, turn=turn, row_bytes=ROW_BYTES, next_row=3)


def rows(first: int, count: int) -> Rows:
    payload = b"".join(bytes([at, at]) for at in range(first, first + count))
    return Rows(1, EPOCH, first, count, payload)


def scores(start: int, count: int) -> PromptLogprobs:
    entries = tuple(PromptLogprob(at, -1.0) for at in range(start, start + count))
    return PromptLogprobs(1, EPOCH, start, entries)


def test_rows_are_taken_once_and_in_order() -> None:
    session = make_session(Sampling(returned=ReturnedRows(3, hidden_states=True)))
    assert take_rows(session, rows(3, 2)) == RowsReturned("a", 3, b"\3\3\4\4")
    assert (session.next_row, session.result_groups) == (5, 1)
    for known in (rows(3, 2), rows(4, 1), rows(1, 4)):
        assert take_rows(session, known) is None
    assert take_rows(session, rows(4, 3)) == RowsReturned("a", 5, b"\5\5\6\6")
    assert (session.next_row, session.result_groups, session.progress) == (7, 2, 2)


def test_scores_are_taken_once_and_end_with_the_prompt() -> None:
    session = make_session(Sampling(prompt_logprobs=2))
    first, second = scores(1, 2), scores(2, 4)
    assert take_scores(session, first) == PromptScored("a", 1, first.entries)
    assert (session.scored, session.result_groups) == (3, 1)
    assert session.turn.sampling.prompt_logprobs == 2
    assert take_scores(session, first) is None
    assert take_scores(session, second) == PromptScored("a", 3, second.entries[1:3])
    assert (session.scored, session.result_groups, session.progress) == (5, 2, 2)
    assert session.turn.sampling.prompt_logprobs == -1, "tails that come later do not report again"
    assert take_scores(session, second) is None
