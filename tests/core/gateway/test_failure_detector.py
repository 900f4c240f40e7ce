"""The failure detector in virtual time: silent servers are suspected, and streams recover from a frozen server."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.core.gateway import TWICE, Swarm, swarm_of
from support.core.server import Server, expected

from modelswarm_gateway.core.detection.failure_detector import (
    FIRST_ESTIMATE,
    MAX_TIMEOUT,
    FailureDetector,
)
from modelswarm_gateway.core.detection.stall_clock import StallClock
from modelswarm_gateway.core.interface.effects import (
    CloseLink,
    Ejected,
    Refused,
    Rerouted,
    SessionLost,
)

FIRST = 4 * FIRST_ESTIMATE  # seconds: the timeout of a server without heartbeats so far


def detector_after(gaps: list[float]) -> tuple[FailureDetector, float]:
    """Return a detector that heard a server on a live route with these gaps, and the time of the last message."""
    detector, time = FailureDetector(0.3), 0.0
    detector.add_peer("a", time)
    detector.set_monitored({"a"}, time)
    for gap in gaps:
        time += gap
        detector.on_message("a", time)
    return detector, time


def test_regular_server_is_suspected_after_four_gaps() -> None:
    detector, time = detector_after([0.1] * 300)
    assert detector.detect(time + 0.39) == []
    assert detector.detect(time + 0.41) == ["a"]


def test_frequent_messages_do_not_shorten_the_timeout() -> None:
    detector, time = detector_after([0.01] * 1000 + [0.11] * 200)
    assert detector.timeout("a") == pytest.approx(0.44)
    assert detector.detect(time + 0.3) == []


def test_late_heartbeats_lengthen_timeout_up_to_maximum() -> None:
    assert detector_after([0.1, 0.3] * 200)[0].timeout("a") == pytest.approx(1.2)
    assert detector_after([2.0] * 200)[0].timeout("a") == MAX_TIMEOUT


@pytest.mark.parametrize(
    ("interval", "timeout"), [(5.0, 15.0), (1e9, 15.0), (0.2, FIRST), (1.0, 3.0)]
)
def test_declared_heartbeat_interval_sets_timeout(interval: float, timeout: float) -> None:
    detector = FailureDetector(0.3)
    detector.add_peer("a", 0.0, interval)
    detector.set_monitored({"a"}, 0.0)
    assert detector.timeout("a") == pytest.approx(timeout)


def test_hello_heartbeat_interval_reaches_failure_detector() -> None:
    swarm = Swarm()
    for _ in range(2):
        swarm.serve(0, 4, {"heartbeat_ms": 1000})
    detector = swarm.core._health_monitor._failure_detector
    assert {detector.timeout(peer) for peer in swarm.servers} == {3.0}


def test_idle_server_is_not_suspected() -> None:
    detector = FailureDetector(0.3)
    detector.add_peer("a", 0.0)
    detector.set_monitored((), 1000.0)
    assert detector.detect(1000.0) == []


def test_timeout_starts_at_first_live_route() -> None:
    detector = FailureDetector(0.3)
    detector.add_peer("a", 0.0)
    detector.set_monitored({"a"}, 4.9)
    assert detector.detect(4.9 + 0.9 * FIRST) == []
    assert detector.detect(4.9 + 1.1 * FIRST) == ["a"]


def test_pause_before_live_route_is_not_counted_as_gap() -> None:
    detector = FailureDetector(0.3)
    detector.add_peer("a", 0.0)
    detector.set_monitored({"a"}, 5.0)
    detector.on_message("a", 5.1)
    assert detector.timeout("a") == pytest.approx(FIRST)


def test_outage_is_detected_once_and_keeps_the_timeout() -> None:
    detector, time = detector_after([0.1] * 300)
    assert detector.detect(time + 1.0) == ["a"]
    assert detector.detect(time + 2.0) == []
    assert detector.suspected == {"a"}
    assert detector.on_message("a", time + 60.0)
    assert not detector.suspected
    assert detector.timeout("a") == pytest.approx(0.4)


def test_removed_server_is_not_suspected() -> None:
    detector, time = detector_after([0.1] * 300)
    detector.remove_peer("a")
    assert detector.detect(time + 9.0) == []
    assert not detector.on_message("a", time + 9.0)


def test_stall_clock_does_not_advance_during_stall() -> None:
    clock = StallClock()
    assert clock.elapsed(100.0) == 0.0
    assert clock.elapsed(100.04) == pytest.approx(0.04)
    assert clock.advance(100.05) == pytest.approx(0.0)
    assert clock.elapsed(130.0) == pytest.approx(0.15)  # messages read before the tick
    assert clock.advance(130.0) == pytest.approx(29.85)
    assert clock.elapsed(130.0) == pytest.approx(0.15)  # messages read after the tick


# ---- the core


def running(swarm: Swarm) -> None:
    """Start a session and run it until it waits for its reader."""
    swarm.gateway.start("a", [5, 6, 7], 40, ahead=4)
    swarm.wait(0.5)


def read_all(swarm: Swarm) -> list[int]:
    swarm.gateway.read("a", 1000)
    return swarm.gateway.tokens("a")


def causes(swarm: Swarm) -> list[str]:
    return [effect.cause for effect in swarm.gateway.all(Rerouted)]


@pytest.mark.parametrize("hop", [0, 1])
def test_session_leaves_frozen_server_with_same_tokens(hop: int) -> None:
    swarm = swarm_of(*TWICE)
    running(swarm)
    before = swarm.route("a")
    frozen = before[hop]
    frozen.frozen = True
    swarm.wait(1.2)
    assert causes(swarm) == ["silent"]
    assert {e.peer for e in swarm.gateway.all(Ejected)} == {frozen.peer}
    assert frozen not in swarm.route("a") and swarm.route("a")[1 - hop] is before[1 - hop]
    assert read_all(swarm) == expected([5, 6, 7], 40)


def test_late_messages_of_frozen_server_change_nothing() -> None:
    swarm = swarm_of(*TWICE)
    running(swarm)
    frozen = swarm.route("a")[0]
    frozen.frozen = True
    swarm.wait(1.2)
    frozen.frozen = False
    swarm.run()
    swarm.wait(0.5)
    assert frozen.core.stats.sessions == 0
    assert read_all(swarm) == expected([5, 6, 7], 40)
    assert causes(swarm) == ["silent"]


def test_frozen_server_without_replica_is_waited_for() -> None:
    swarm = swarm_of((0, 2), (2, 4))
    running(swarm)
    frozen = swarm.route("a")[1]
    frozen.frozen = True
    swarm.wait(3.0)
    frozen.frozen = False
    swarm.run()
    swarm.wait(0.3)
    assert read_all(swarm) == expected([5, 6, 7], 40)
    assert not swarm.gateway.troubles("a")


def test_own_stall_causes_no_suspicion() -> None:
    swarm = swarm_of(*TWICE)
    running(swarm)
    swarm.now += 10.0  # no ticks, and the heartbeats of that time are unread
    swarm.core.tick(swarm.now)
    swarm.run()
    swarm.wait(1.0)
    assert causes(swarm) == []
    assert read_all(swarm) == expected([5, 6, 7], 40)


@pytest.mark.parametrize("event", ["heartbeat", "tick"])
def test_gateway_stalled_half_a_lease_fences_its_sessions(event: str) -> None:
    """`event`: the first one after the stall."""
    swarm = swarm_of(*TWICE)
    running(swarm)
    before = swarm.gateway.view("a").epoch
    head = swarm.route("a")[0]
    swarm.now += 16.0
    if event == "heartbeat":
        swarm.core.receive(head.peer, head.core.heartbeat(), swarm.now)
    else:
        swarm.core.tick(swarm.now)
    assert swarm.gateway.view("a").epoch > before
    swarm.run()
    swarm.wait(0.5)
    assert causes(swarm) == ["late"]
    assert read_all(swarm) == expected([5, 6, 7], 40)


def test_suspected_server_gets_no_session_until_its_canary() -> None:
    swarm = swarm_of(*TWICE)
    running(swarm)
    frozen = swarm.route("a")[0]
    frozen.frozen = True
    swarm.wait(1.2)
    for number in range(8):
        assert frozen.peer not in started(swarm, f"b{number}")
    frozen.frozen = False
    swarm.run()
    swarm.wait(3.0)
    tried = [number for number in range(8) if frozen.peer in started(swarm, f"c{number}", new=1)]
    assert tried, "the server gets sessions again"


def test_server_due_its_canary_gets_one_session_until_a_token() -> None:
    """The load of the other server does not matter. After the token, the server is one like any other."""
    swarm = swarm_of((0, 4), (0, 4))
    running(swarm)
    frozen = swarm.route("a")[0]
    frozen.frozen = True
    swarm.wait(1.2)
    frozen.frozen = False
    swarm.run()
    swarm.wait(3.0)
    frozen.lazy = True
    assert at_once(swarm, frozen, "b").count(frozen.peer) == 1
    swarm.wait(0.5)
    assert frozen.peer not in at_once(swarm, frozen, "c"), "the canary has no token yet"
    frozen.lazy = False
    swarm.run()
    assert at_once(swarm, frozen, "d").count(frozen.peer) > 1
    assert not [e for e in swarm.effects if isinstance(e, SessionLost | Refused)]


def at_once(swarm: Swarm, idle: Server, name: str) -> list[str]:
    """Return the servers of four sessions that arrive in one instant, while all servers but `idle` are busy."""
    for server in swarm.servers.values():
        heartbeat = replace(server.core.heartbeat(), running=0 if server is idle else 40)
        swarm.core.receive(server.peer, heartbeat, swarm.now)
    names = [f"{name}{number}" for number in range(4)]
    for each in names:
        swarm.gateway.begin(each, [1, 2, 3], 8, ahead=64)
    swarm.run()
    views = [view for each in names if (view := swarm.core.find_view(each))]
    return [hop.peer for view in views for hop in view.route]


def started(swarm: Swarm, session: str, new: int = 0) -> list[str]:
    """Start and close a session. Return the peers of its route."""
    swarm.gateway.start(session, [1, 2, 3], new, ahead=64)
    assert swarm.gateway.tokens(session)
    assert not [e for e in swarm.effects if isinstance(e, SessionLost | Refused)]
    view = swarm.core.find_view(session)
    assert view is not None
    swarm.core.close_session(session, swarm.now)
    swarm.run()
    return [hop.peer for hop in view.route]


def test_link_of_silent_server_is_closed() -> None:
    """Links of idle servers are closed too: three heartbeats are missing."""
    swarm = swarm_of((0, 2), (2, 4))
    swarm.wait(30.0)
    assert not closed(swarm)
    dead = next(iter(swarm.servers.values()))
    dead.frozen = True
    swarm.wait(14.0)
    assert not closed(swarm)
    swarm.wait(3.0)
    assert closed(swarm) == {dead.peer}


def closed(swarm: Swarm) -> set[str]:
    return {effect.peer for effect in swarm.gateway.all(CloseLink)}


def test_hop_that_does_not_answer_fence_is_replaced() -> None:
    """The server froze before any session ran there: no heartbeat is due, only the FenceAck."""
    swarm = swarm_of((0, 4), (0, 4))
    first, second = swarm.servers.values()
    first.frozen = True
    busy = replace(second.core.heartbeat(), running=40)  # so that the frozen server is chosen
    swarm.core.receive(second.peer, busy, swarm.now)
    swarm.gateway.start("a", [5, 6, 7], 40, ahead=64)
    assert swarm.route("a") == [first]
    swarm.wait(0.5)
    assert swarm.route("a") == [second]
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 40)


def test_turn_waits_while_its_only_server_may_answer() -> None:
    swarm = swarm_of((0, 4))
    [only] = swarm.servers.values()
    only.frozen = True
    swarm.gateway.start("a", [5, 6, 7], 40, ahead=64)
    swarm.wait(2.0)
    assert not swarm.gateway.troubles("a")
    only.frozen = False
    swarm.run()
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 40)
