"""When which gateway is due a beat, in made-up time."""

from __future__ import annotations

from modelswarm_serving.beats import BeatTimer


def timer() -> BeatTimer:
    return BeatTimer(lambda: 0.5)


def test_the_first_beat_is_due_at_once() -> None:
    beats = timer()
    beats.join("g")
    assert beats.due(0.0, busy=False) == ["g"]
    assert beats.due(0.0, busy=False) == []


def test_idle_beats_come_before_five_seconds_are_over() -> None:
    beats = timer()
    beats.join("g")
    beats.due(0.0, busy=False)
    assert beats.due(4.0, busy=False) == []
    assert beats.due(5.0, busy=False) == ["g"]


def test_busy_beats_come_every_tenth_of_a_second() -> None:
    beats = timer()
    beats.join("g")
    times = [t / 100 for t in range(100) if beats.due(t / 100, busy=True)]
    assert len(times) == 10


def test_data_counts_as_a_beat() -> None:
    beats = timer()
    beats.join("g")
    beats.join("h")
    beats.due(0.0, busy=True)
    beats.sent("g", 0.09)
    assert beats.due(0.1, busy=True) == ["h"]


def test_a_gateway_that_left_is_due_nothing() -> None:
    beats = timer()
    beats.join("g")
    beats.leave("g")
    beats.sent("g", 1.0)
    assert beats.due(9.0, busy=True) == []
