"""The times at which heartbeats to each peer are due, in virtual time."""

from __future__ import annotations

from itertools import pairwise

from modelswarm.protocol.heartbeat import BUSY_SECONDS, STATUS_SECONDS, HeartbeatTimer


def make_server_timer() -> HeartbeatTimer:
    return HeartbeatTimer.for_server(lambda: 0.5)


def test_first_heartbeat_is_due_at_once() -> None:
    timer = make_server_timer()
    timer.on_peer_connected("g")
    assert timer.take_due(0.0, busy=()) == ["g"]
    assert timer.take_due(0.0, busy=()) == []


def test_idle_heartbeat_is_due_every_five_seconds() -> None:
    timer = make_server_timer()
    timer.on_peer_connected("g")
    timer.take_due(0.0, busy=())
    assert timer.take_due(4.0, busy=()) == []
    assert timer.take_due(5.0, busy=()) == ["g"]


def test_busy_heartbeat_is_due_every_100_ms() -> None:
    timer = make_server_timer()
    timer.on_peer_connected("g")
    times = [tick for tick in range(10) if timer.take_due(tick * BUSY_SECONDS, busy=("g",))]
    assert len(times) == 10


def test_sent_data_postpones_the_heartbeat() -> None:
    timer = make_server_timer()
    timer.on_peer_connected("g")
    timer.on_peer_connected("h")
    timer.take_due(0.0, busy=())
    timer.on_sent("g", 0.09)
    assert timer.take_due(0.1, busy=("g", "h")) == ["h"]


def test_disconnected_peer_is_due_no_heartbeat() -> None:
    timer = make_server_timer()
    timer.on_peer_connected("g")
    timer.on_peer_lost("g")
    timer.on_sent("g", 1.0)
    assert timer.take_due(9.0, busy=("g",)) == []


def test_data_sent_between_polls_skips_no_heartbeat() -> None:
    timer = make_server_timer()
    timer.on_peer_connected("g")
    timer.on_sent("g", 0.04)
    assert timer.take_due(BUSY_SECONDS, busy=("g",)) == ["g"]


def test_only_peers_with_running_sessions_get_busy_heartbeats() -> None:
    timer = make_server_timer()
    timer.on_peer_connected("g")
    timer.on_peer_connected("h")
    timer.take_due(0.0, busy=())
    assert timer.take_due(1.0, busy=("h",)) == ["h"]


def test_busy_peer_receiving_data_still_gets_status_heartbeats() -> None:
    timer = make_server_timer()
    timer.on_peer_connected("g")
    sent_at = []
    for tick in range(51):
        now = tick * BUSY_SECONDS
        timer.on_sent("g", now - 0.001)
        if timer.take_due(now, busy=("g",)):
            sent_at.append(now)
    assert all(b - a <= STATUS_SECONDS + 1e-9 for a, b in pairwise(sent_at))
    assert 10 <= len(sent_at) <= 13, "data replaces the heartbeats between"


def test_peer_gets_a_heartbeat_when_its_last_session_ends() -> None:
    timer = make_server_timer()
    timer.on_peer_connected("g")
    timer.take_due(0.0, busy=("g",))
    timer.on_sent("g", 0.09)
    assert timer.take_due(0.1, busy=()) == ["g"]
    assert timer.take_due(0.2, busy=()) == []


def test_idle_peer_receiving_data_still_gets_status_heartbeats() -> None:
    timer = make_server_timer()
    timer.on_peer_connected("g")
    timer.take_due(0.0, busy=())
    for second in range(5):
        timer.on_sent("g", float(second))
    assert timer.take_due(5.0, busy=()) == ["g"]


def test_gateway_sends_heartbeats_only_without_other_data() -> None:
    timer = HeartbeatTimer.for_gateway(lease_seconds=8.0)
    timer.on_peer_connected("s")
    assert timer.take_due(0.0, busy=()) == ["s"]
    timer.on_sent("s", 1.9)
    assert timer.take_due(3.8, busy=()) == []
    assert timer.take_due(3.9, busy=()) == ["s"]
    timer.on_sent("s", 4.0)
    assert timer.take_due(4.95, busy=("s",)) == []
    assert timer.take_due(5.0, busy=("s",)) == ["s"]
    assert HeartbeatTimer.for_gateway(lease_seconds=0.4)._busy_seconds == 0.05, (
        "a lease spans eight busy heartbeats"
    )
