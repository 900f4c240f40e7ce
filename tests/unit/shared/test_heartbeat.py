"""When which peer is due a beat, in made-up time."""

from __future__ import annotations

from itertools import pairwise

from modelswarm.protocol.heartbeat import BUSY_SECONDS, STATUS_SECONDS, HeartbeatTimer


def server_timer() -> HeartbeatTimer:
    return HeartbeatTimer.for_server(lambda: 0.5)


def test_the_first_beat_is_due_at_once() -> None:
    beats = server_timer()
    beats.on_peer_connected("g")
    assert beats.take_due(0.0, busy=()) == ["g"]
    assert beats.take_due(0.0, busy=()) == []


def test_idle_beats_come_before_five_seconds_are_over() -> None:
    beats = server_timer()
    beats.on_peer_connected("g")
    beats.take_due(0.0, busy=())
    assert beats.take_due(4.0, busy=()) == []
    assert beats.take_due(5.0, busy=()) == ["g"]


def test_busy_beats_come_every_tenth_of_a_second() -> None:
    beats = server_timer()
    beats.on_peer_connected("g")
    times = [tick for tick in range(10) if beats.take_due(tick * BUSY_SECONDS, busy=("g",))]
    assert len(times) == 10


def test_data_count_as_a_sign_of_life() -> None:
    beats = server_timer()
    beats.on_peer_connected("g")
    beats.on_peer_connected("h")
    beats.take_due(0.0, busy=())
    beats.on_sent("g", 0.09)
    assert beats.take_due(0.1, busy=("g", "h")) == ["h"]


def test_a_gateway_that_left_is_due_nothing() -> None:
    beats = server_timer()
    beats.on_peer_connected("g")
    beats.on_peer_lost("g")
    beats.on_sent("g", 1.0)
    assert beats.take_due(9.0, busy=("g",)) == []


def test_what_was_said_between_two_looks_makes_no_silence_of_two() -> None:
    beats = server_timer()
    beats.on_peer_connected("g")
    beats.on_sent("g", 0.04)
    assert beats.take_due(BUSY_SECONDS, busy=("g",)) == ["g"]


def test_only_gateways_whose_sessions_run_hear_often() -> None:
    beats = server_timer()
    beats.on_peer_connected("g")
    beats.on_peer_connected("h")
    beats.take_due(0.0, busy=())
    assert beats.take_due(1.0, busy=("h",)) == ["h"]


def test_a_gateway_that_hears_data_all_the_time_still_hears_how_the_server_does() -> None:
    beats = server_timer()
    beats.on_peer_connected("g")
    told = []
    for tick in range(51):
        now = tick * BUSY_SECONDS
        beats.on_sent("g", now - 0.001)
        if beats.take_due(now, busy=("g",)):
            told.append(now)
    assert all(b - a <= STATUS_SECONDS + 1e-9 for a, b in pairwise(told))
    assert 10 <= len(told) <= 13, "and data need no beats beside them"


def test_a_gateway_whose_last_session_ended_hears_so_at_once() -> None:
    beats = server_timer()
    beats.on_peer_connected("g")
    beats.take_due(0.0, busy=("g",))
    beats.on_sent("g", 0.09)
    assert beats.take_due(0.1, busy=()) == ["g"]
    assert beats.take_due(0.2, busy=()) == []


def test_a_gateway_that_rests_and_is_spoken_to_hears_how_the_server_does() -> None:
    beats = server_timer()
    beats.on_peer_connected("g")
    beats.take_due(0.0, busy=())
    for second in range(5):
        beats.on_sent("g", float(second))
    assert beats.take_due(5.0, busy=()) == ["g"]


def test_a_server_hears_no_beats_of_a_gateway_that_it_hears_anyway() -> None:
    beats = HeartbeatTimer.for_gateway(lease_seconds=8.0)
    beats.on_peer_connected("s")
    assert beats.take_due(0.0, busy=()) == ["s"]
    beats.on_sent("s", 1.9)
    assert beats.take_due(3.8, busy=()) == []
    assert beats.take_due(3.9, busy=()) == ["s"]
    beats.on_sent("s", 4.0)
    assert beats.take_due(4.95, busy=("s",)) == []
    assert beats.take_due(5.0, busy=("s",)) == ["s"]
    assert HeartbeatTimer.for_gateway(lease_seconds=0.4)._busy_seconds == 0.05, (
        "a lease spans eight of them"
    )
