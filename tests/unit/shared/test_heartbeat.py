"""When which peer is due a beat, in made-up time."""

from __future__ import annotations

from itertools import pairwise

from modelswarm.protocol.heartbeat import BUSY_SECONDS
from modelswarm_gateway import beats as gateway
from modelswarm_serving.beats import STATUS_SECONDS, BeatTimer


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


def test_data_count_as_a_sign_of_life() -> None:
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


def test_a_gateway_that_hears_data_all_the_time_still_hears_how_the_server_does() -> None:
    beats = timer()
    beats.join("g")
    told = []
    for tick in range(51):
        now = tick * BUSY_SECONDS
        beats.sent("g", now - 0.001)
        if beats.due(now, busy=("g",)):
            told.append(now)
    assert all(b - a <= STATUS_SECONDS + 1e-9 for a, b in pairwise(told))
    assert 10 <= len(told) <= 13, "and data need no beats beside them"


def test_a_gateway_whose_last_session_ended_hears_so_at_once() -> None:
    beats = timer()
    beats.join("g")
    beats.due(0.0, busy=("g",))
    beats.sent("g", 0.09)
    assert beats.due(0.1, busy=()) == ["g"]
    assert beats.due(0.2, busy=()) == []


def test_a_gateway_that_rests_and_is_spoken_to_hears_how_the_server_does() -> None:
    beats = timer()
    beats.join("g")
    beats.due(0.0, busy=())
    for second in range(5):
        beats.sent("g", float(second))
    assert beats.due(5.0, busy=()) == ["g"]


def test_a_server_hears_no_beats_of_a_gateway_that_it_hears_anyway() -> None:
    beats = gateway.BeatTimer(lease_seconds=8.0)
    beats.join("s")
    assert beats.due(0.0, busy=()) == ["s"]
    beats.sent("s", 1.9)
    assert beats.due(3.8, busy=()) == []
    assert beats.due(3.9, busy=()) == ["s"]
    beats.sent("s", 4.0)
    assert beats.due(4.95, busy=("s",)) == []
    assert beats.due(5.0, busy=("s",)) == ["s"]
    assert gateway.BeatTimer(lease_seconds=0.4)._busy == 0.05, "a lease lives on eight of them"
