"""When which gateway is due a beat, in made-up time."""

from __future__ import annotations

from modelswarm_serving.beats import BUSY_SECONDS, BeatTimer


def timer() -> BeatTimer:
    return BeatTimer(lambda: 0.5)


def test_the_first_beat_is_due_at_once() -> None:
    beats = timer()
    beats.join("g")
    assert beats.due(0.0, busy=()) == ["g"]
    assert beats.due(0.0, busy=()) == []


def test_idle_beats_come_before_five_seconds_are_over() -> None:
    beats = timer()
    beats.join("g")
    beats.due(0.0, busy=())
    assert beats.due(4.0, busy=()) == []
    assert beats.due(5.0, busy=()) == ["g"]


def test_busy_beats_come_every_tenth_of_a_second() -> None:
    beats = timer()
    beats.join("g")
    times = [tick for tick in range(10) if beats.due(tick * BUSY_SECONDS, busy=("g",))]
    assert len(times) == 10


def test_data_counts_as_a_beat() -> None:
    beats = timer()
    beats.join("g")
    beats.join("h")
    beats.due(0.0, busy=())
    beats.sent("g", 0.09)
    assert beats.due(0.1, busy=("g", "h")) == ["h"]


def test_a_gateway_that_left_is_due_nothing() -> None:
    beats = timer()
    beats.join("g")
    beats.leave("g")
    beats.sent("g", 1.0)
    assert beats.due(9.0, busy=("g",)) == []


def test_what_was_said_between_two_looks_makes_no_silence_of_two() -> None:
    beats = timer()
    beats.join("g")
    beats.sent("g", 0.04)
    assert beats.due(BUSY_SECONDS, busy=("g",)) == ["g"]


def test_only_gateways_whose_sessions_run_hear_often() -> None:
    beats = timer()
    beats.join("g")
    beats.join("h")
    beats.due(0.0, busy=())
    assert beats.due(1.0, busy=("h",)) == ["h"]
