"""The position at which a cut stream resumes, from the log of its session and the last event id of the client."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelswarm.protocol.messages import Finish, Grammar, ReturnedRows, Sampling, Turn
from modelswarm_gateway.core.interface.turn import ParkedTurn
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.named_sessions import wire_name
from modelswarm_gateway.generation.resumption import (
    LogMark,
    format_event_id,
    parse_event_id,
    resume_turn,
)

PROMPT = (5, 6, 7)
MARK = "0123cdef"
TURN = Turn(reserved_positions=9, end=10, sampling=Sampling(seed=4, eos=(2,)), begin=len(PROMPT))
TOKENS = st.integers(0, 9)


def make_parked_turn(*generated: int) -> ParkedTurn:
    return ParkedTurn((*PROMPT, *generated), TURN)


def mark_of(*generated: int) -> str:
    """Return the mark of the log that ends with these tokens."""
    return str(LogMark((*PROMPT, *generated)))


@pytest.mark.parametrize(
    ("event_id", "expected"),
    [(f" 3-{MARK} ", (3, MARK)), (format_event_id(57, MARK), (57, MARK))],
)
def test_event_id_parses_to_position_and_mark(event_id: str, expected: tuple[int, str]) -> None:
    assert parse_event_id(event_id) == expected


@pytest.mark.parametrize(
    "event_id",
    ["", "x", "57", "-1", f"0:5-{MARK}", "9" * 30, "5-", "5-1234567", "5-0000000G"],
)
def test_event_id_without_position_or_mark_is_refused(event_id: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_event_id(event_id)
    assert (refused.value.code, refused.value.param) == (Code.INVALID_REQUEST, "Last-Event-ID")


def test_resumed_turn_replays_generated_tokens_with_positions() -> None:
    resumed = resume_turn(PROMPT, make_parked_turn(8, 9), 3, mark_of(8))
    assert [(e.position, e.token, e.finish) for e in resumed.token_events(3)] == [
        (3, 8, Finish.NONE),
        (4, 9, Finish.NONE),
    ]
    assert resumed.turn.sampling.seed == 4


@pytest.mark.parametrize(("own", "forced"), [(0, 0), (8, 8), (16, 16), (None, 0)])
def test_resumed_turn_reports_what_its_own_request_wants(own: int | None, forced: int) -> None:
    """Forced tokens have no log probability. The first request wanted none; the one that resumes it does."""
    turn = replace(TURN, sampling=replace(TURN.sampling, grammar=Grammar("g", "v", 16)))
    kept = ParkedTurn((*PROMPT, 8, 9), turn)
    asked = Sampling(seed=99, logprobs=3, returned=ReturnedRows(4, logits=True))
    if own is not None:
        asked = replace(asked, grammar=Grammar("g", "v", own))
    rest = resume_turn(PROMPT, kept, 3, mark_of(8)).sampling(asked)
    assert (rest.seed, rest.eos) == (4, (2,))
    assert (rest.logprobs, rest.returned) == (3, asked.returned)
    assert rest.grammar == Grammar("g", "v", forced)


def test_finished_turn_ends_again_with_the_same_finish() -> None:
    stopped = resume_turn(PROMPT, make_parked_turn(8, 2), 3, mark_of(8))
    full = resume_turn(PROMPT, make_parked_turn(8, 9, 8, 9, 8, 9, 8), 3, mark_of(8))
    assert stopped.token_events(3)[-1].finish is Finish.STOP
    assert full.token_events(3)[-1].finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("log", "after", "mark", "code"),
    [
        (None, 3, mark_of(8), Code.SESSION_LOST),
        (ParkedTurn(PROMPT, TURN), 3, mark_of(8), Code.SESSION_LOST),
        (make_parked_turn(8), 4, mark_of(8, 9), Code.SESSION_LOST),
        (make_parked_turn(8), 3, mark_of(9), Code.SESSION_LOST),
        (make_parked_turn(8), 3, "", Code.SESSION_LOST),
        (make_parked_turn(8), 2, mark_of(), Code.INVALID_REQUEST),
        (make_parked_turn(8), 1, str(LogMark(PROMPT[:2])), Code.INVALID_REQUEST),
    ],
)
def test_resumption_that_does_not_match_the_log_is_refused(
    log: ParkedTurn | None, after: int, mark: str, code: Code
) -> None:
    with pytest.raises(ApiError) as refused:
        resume_turn(PROMPT, log, after, mark)
    assert refused.value.code is code


@settings(deadline=None, derandomize=True)
@given(st.lists(TOKENS, min_size=1, max_size=6), st.integers(0, 9), st.data())
def test_resume_with_another_prompt_than_the_turn_is_refused(
    prompt: list[int], after: int, data: st.DataObject
) -> None:
    """Even with the right mark, the log before the turn is not a part of its answer."""
    kept = make_parked_turn(*data.draw(st.lists(TOKENS, min_size=1, max_size=6)))
    mark = str(LogMark(kept.tokens[: after + 1]))
    try:
        resumed = resume_turn(prompt, kept, after, mark)
    except ApiError:
        return
    assert tuple(prompt) == PROMPT
    assert resumed.generated == kept.tokens[len(PROMPT) :]


@settings(deadline=None, derandomize=True)
@given(
    st.lists(TOKENS, max_size=8), st.integers(0, 9), st.from_regex("[0-9a-f]{8}", fullmatch=True)
)
def test_resume_with_a_guessed_mark_is_refused(prompt: list[int], after: int, mark: str) -> None:
    kept = make_parked_turn(8, 9, 8)
    if mark != str(LogMark(kept.tokens[: after + 1])):
        with pytest.raises(ApiError):
            resume_turn(prompt, kept, after, mark)


def test_log_mark_is_independent_of_the_chunks() -> None:
    mark = LogMark(PROMPT)
    mark.extend((8,))
    mark.extend((9, 300_000))
    assert str(mark) == str(LogMark((*PROMPT, 8, 9, 300_000)))
    assert str(mark) != str(LogMark((*PROMPT, 8, 9, 300_001)))


def test_stream_resumes_only_with_the_log_that_was_sent() -> None:
    sent = mark_of(8)
    assert resume_turn(PROMPT, make_parked_turn(8, 9), 3, sent).generated == (8, 9)
    for log in (make_parked_turn(9, 9), make_parked_turn(), None, ParkedTurn((5, 6, 8, 9), TURN)):
        with pytest.raises(ApiError) as refused:
            resume_turn(PROMPT, log, 3, sent)
        assert refused.value.code is Code.SESSION_LOST, "an older log, or the log of another turn"
    with pytest.raises(ApiError) as refused:
        resume_turn((5, 6, 8), make_parked_turn(8, 9), 3, sent)
    assert refused.value.code is Code.INVALID_REQUEST, "the prompt differs"


def test_wire_name_is_unique_per_model_and_session() -> None:
    names = {wire_name(key) for key in (("a", "b"), ("a", "c"), ("ab", ""), ("b", "a"))}
    assert len(names) == 4
    assert wire_name(("a", "b")) == wire_name(("a", "b"))
