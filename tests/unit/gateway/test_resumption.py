"""The position at which a cut stream resumes, from the log of its session and the last event id of the client."""

from __future__ import annotations

import pytest

from modelswarm.protocol.messages import Finish, Sampling, Turn
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
TURN = Turn(reserved_positions=9, end=10, sampling=Sampling(seed=4, eos=(2,)))


def make_parked_turn(*generated: int) -> ParkedTurn:
    return ParkedTurn((*PROMPT, *generated), TURN)


@pytest.mark.parametrize(
    ("event_id", "expected"),
    [
        ("57", (57, "")),
        ("0:57", (57, "")),
        (" 0:3 ", (3, "")),
        (format_event_id(57, MARK), (57, MARK)),
        (f"0:{format_event_id(57, MARK)}", (57, MARK)),
        (format_event_id(57, ""), (57, "")),
    ],
)
def test_event_id_parses_to_position_and_mark(event_id: str, expected: tuple[int, str]) -> None:
    assert parse_event_id(event_id) == expected


@pytest.mark.parametrize(
    "event_id", ["", "x", "1:57", "-1", "0:", "9" * 30, "5 7", "5-", "5-1234567", "5-0000000G"]
)
def test_malformed_event_id_is_refused(event_id: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_event_id(event_id)
    assert (refused.value.code, refused.value.param) == (Code.INVALID_REQUEST, "Last-Event-ID")


def test_resumed_turn_replays_generated_tokens_with_positions() -> None:
    resumed = resume_turn(PROMPT, make_parked_turn(8, 9), after=3)
    assert resumed is not None
    assert [(e.position, e.token, e.finish) for e in resumed.token_events(3)] == [
        (3, 8, Finish.NONE),
        (4, 9, Finish.NONE),
    ]
    assert resumed.turn.sampling.seed == 4


def test_finished_turn_ends_again_with_the_same_finish() -> None:
    stopped = resume_turn(PROMPT, make_parked_turn(8, 2), after=3)
    full = resume_turn(PROMPT, make_parked_turn(8, 9, 8, 9, 8, 9, 8), after=2)
    assert stopped is not None and full is not None
    assert stopped.token_events(3)[-1].finish is Finish.STOP
    assert full.token_events(3)[-1].finish is Finish.LENGTH


@pytest.mark.parametrize("log", [None, ParkedTurn((5, 6), TURN), ParkedTurn(PROMPT, TURN)])
def test_turn_without_generated_tokens_starts_afresh(
    log: ParkedTurn | None,
) -> None:
    assert resume_turn(PROMPT, log, after=2) is None


@pytest.mark.parametrize(
    ("log", "after", "code"),
    [
        (None, 3, Code.SESSION_LOST),
        (make_parked_turn(8), 4, Code.SESSION_LOST),
        (make_parked_turn(8), 1, Code.INVALID_REQUEST),
        (ParkedTurn((5, 6, 8, 9), TURN), 3, Code.INVALID_REQUEST),
    ],
)
def test_resumption_that_does_not_match_the_log_is_refused(
    log: ParkedTurn | None, after: int, code: Code
) -> None:
    with pytest.raises(ApiError) as refused:
        resume_turn(PROMPT, log, after)
    assert refused.value.code is code


def test_log_mark_is_independent_of_the_chunks() -> None:
    mark = LogMark(PROMPT)
    mark.extend((8,))
    mark.extend((9, 300_000))
    assert str(mark) == str(LogMark((*PROMPT, 8, 9, 300_000)))
    assert str(mark) != str(LogMark((*PROMPT, 8, 9, 300_001)))


def test_stream_resumes_only_with_the_log_that_was_sent() -> None:
    sent = str(LogMark((*PROMPT, 8)))
    resumed = resume_turn(PROMPT, make_parked_turn(8, 9), 3, sent)
    assert resumed is not None
    assert resumed.generated == (8, 9)
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
