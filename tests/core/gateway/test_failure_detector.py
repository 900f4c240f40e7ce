"""Silence: who is suspected when, by virtual time; and what the gateway does about a server that freezes."""

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

FIRST = 4 * FIRST_ESTIMATE  # the patience with a server that has not beaten yet


def beating(gaps: list[float]) -> tuple[FailureDetector, float]:
    """A server on a live route that has beaten with these gaps, and the time of its last beat."""
    suspicion, time = FailureDetector(0.3), 0.0
    suspicion.add_peer("a", time)
    suspicion.set_monitored({"a"}, time)
    for gap in gaps:
        time += gap
        suspicion.on_message("a", time)
    return suspicion, time


def test_a_regular_server_is_suspected_after_four_gaps() -> None:
    suspicion, time = beating([0.1] * 300)
    assert suspicion.detect(time + 0.39) == []
    assert suspicion.detect(time + 0.41) == ["a"]


def test_tokens_do_not_make_the_gateway_impatient() -> None:
    suspicion, time = beating([0.01] * 1000 + [0.11] * 200)
    assert suspicion.timeout("a") == pytest.approx(0.44)
    assert suspicion.detect(time + 0.3) == []


def test_a_server_whose_beats_are_late_gets_more_patience_within_limits() -> None:
    assert beating([0.1, 0.3] * 200)[0].timeout("a") == pytest.approx(1.2)
    assert beating([2.0] * 200)[0].timeout("a") == MAX_TIMEOUT


@pytest.mark.parametrize(("beat", "patience"), [(5.0, 15.0), (1e9, 15.0), (0.2, FIRST), (1.0, 3.0)])
def test_a_server_that_says_it_beats_rarely_is_given_three_beats(
    beat: float, patience: float
) -> None:
    suspicion = FailureDetector(0.3)
    suspicion.add_peer("a", 0.0, beat)
    suspicion.set_monitored({"a"}, 0.0)
    assert suspicion.timeout("a") == pytest.approx(patience)


def test_what_a_server_says_of_its_beats_reaches_who_suspects_it() -> None:
    swarm = Swarm()
    for _ in range(2):
        swarm.serve(0, 4, {"heartbeat_ms": 1000})
    suspicion = swarm.core._health_monitor._failure_detector
    assert {suspicion.timeout(peer) for peer in swarm.servers} == {3.0}


def test_nothing_is_expected_of_an_idle_server() -> None:
    suspicion = FailureDetector(0.3)
    suspicion.add_peer("a", 0.0)
    suspicion.set_monitored((), 1000.0)
    assert suspicion.detect(1000.0) == []


def test_a_server_that_was_idle_is_expected_to_beat_only_from_its_first_live_route_on() -> None:
    suspicion = FailureDetector(0.3)
    suspicion.add_peer("a", 0.0)
    suspicion.set_monitored({"a"}, 4.9)
    assert suspicion.detect(4.9 + 0.9 * FIRST) == []
    assert suspicion.detect(4.9 + 1.1 * FIRST) == ["a"]


def test_the_pause_before_a_live_route_is_no_gap_of_beats() -> None:
    suspicion = FailureDetector(0.3)
    suspicion.add_peer("a", 0.0)
    suspicion.set_monitored({"a"}, 5.0)
    suspicion.on_message("a", 5.1)
    assert suspicion.timeout("a") == pytest.approx(FIRST)


def test_an_outage_teaches_nothing_and_is_found_once() -> None:
    suspicion, time = beating([0.1] * 300)
    assert suspicion.detect(time + 1.0) == ["a"]
    assert suspicion.detect(time + 2.0) == []
    assert suspicion.suspected == {"a"}
    assert suspicion.on_message("a", time + 60.0)
    assert not suspicion.suspected
    assert suspicion.timeout("a") == pytest.approx(0.4)


def test_a_server_that_left_is_not_suspected() -> None:
    suspicion, time = beating([0.1] * 300)
    suspicion.remove_peer("a")
    assert suspicion.detect(time + 9.0) == []
    assert not suspicion.on_message("a", time + 9.0)


def test_the_awake_clock_stands_still_while_the_loop_does() -> None:
    clock = StallClock()
    assert clock.elapsed(100.0) == 0.0
    assert clock.elapsed(100.04) == pytest.approx(0.04)
    assert clock.advance(100.05) == pytest.approx(0.0)
    assert clock.elapsed(130.0) == pytest.approx(0.15)  # items that waited for us are read ...
    assert clock.advance(130.0) == pytest.approx(29.85)
    assert clock.elapsed(130.0) == pytest.approx(0.15)  # ... before or after the tick


# ---- the core


def running(swarm: Swarm, ahead: int = 4) -> None:
    """A session that has come as far as its reader lets it."""
    swarm.gateway.start("a", [5, 6, 7], 40, ahead=ahead)
    swarm.wait(0.5)


def read_all(swarm: Swarm) -> list[int]:
    swarm.gateway.read("a", 1000)
    return swarm.gateway.tokens("a")


def causes(swarm: Swarm) -> list[str]:
    return [effect.cause for effect in swarm.gateway.all(Rerouted)]


@pytest.mark.parametrize("hop", [0, 1])
def test_a_frozen_server_is_left_and_the_answer_stays_the_same(hop: int) -> None:
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


def test_what_a_frozen_server_has_to_say_later_changes_nothing() -> None:
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


def test_a_frozen_server_without_a_twin_is_waited_for() -> None:
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


def test_servers_that_beat_are_never_suspected_however_long_the_reader_sleeps() -> None:
    swarm = swarm_of(*TWICE)
    running(swarm, ahead=1)
    swarm.wait(60.0)
    assert causes(swarm) == []


def test_nobody_is_suspected_for_a_stall_of_our_own() -> None:
    swarm = swarm_of(*TWICE)
    running(swarm)
    swarm.now += 10.0  # no ticks, and the beats of that time are still to be read
    swarm.core.tick(swarm.now)
    swarm.run()
    swarm.wait(1.0)
    assert causes(swarm) == []
    assert read_all(swarm) == expected([5, 6, 7], 40)


def test_a_gateway_that_overslept_half_a_lease_fences_before_it_goes_on() -> None:
    swarm = swarm_of(*TWICE)
    running(swarm)
    before = swarm.core.find_view("a")
    swarm.now += 16.0
    swarm.core.receive(swarm.route("a")[0].peer, swarm.route("a")[0].core.heartbeat(), swarm.now)
    after = swarm.core.find_view("a")
    assert before is not None and after is not None
    assert after.epoch > before.epoch
    swarm.run()
    swarm.wait(0.5)
    assert causes(swarm) == ["late"]
    assert read_all(swarm) == expected([5, 6, 7], 40)


def test_a_new_session_avoids_a_suspected_server_and_one_canary_brings_it_back() -> None:
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
    assert tried, "it is capacity again"


def test_of_four_sessions_at_once_a_server_on_trial_gets_one_until_that_has_a_token() -> None:
    """However busy the other one is. Then it is a server like any other."""
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
    assert frozen.peer not in at_once(swarm, frozen, "c"), "no token has come from there yet"
    frozen.lazy = False
    swarm.run()
    assert at_once(swarm, frozen, "d").count(frozen.peer) > 1
    assert not [e for e in swarm.effects if isinstance(e, SessionLost | Refused)]


def at_once(swarm: Swarm, idle: Server, name: str) -> list[str]:
    """The servers that four sessions get which arrive in one instant, when all but one are busy."""
    for server in swarm.servers.values():
        beat = replace(server.core.heartbeat(), running=0 if server is idle else 40)
        swarm.core.receive(server.peer, beat, swarm.now)
    names = [f"{name}{number}" for number in range(4)]
    for each in names:
        swarm.gateway.begin(each, [1, 2, 3], 8, ahead=64)
    swarm.run()
    views = [view for each in names if (view := swarm.core.find_view(each))]
    return [hop.peer for view in views for hop in view.route]


def started(swarm: Swarm, session: str, new: int = 0) -> list[str]:
    """The route of a session that is closed again."""
    swarm.gateway.start(session, [1, 2, 3], new, ahead=64)
    assert swarm.gateway.tokens(session)
    assert not [e for e in swarm.effects if isinstance(e, SessionLost | Refused)]
    view = swarm.core.find_view(session)
    assert view is not None
    swarm.core.close_session(session, swarm.now)
    swarm.run()
    return [hop.peer for hop in view.route]


def test_the_link_of_a_server_that_stays_silent_is_closed() -> None:
    """Idle ones too: three beats are missing."""
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


def test_a_hop_that_does_not_answer_its_fence_is_planned_around() -> None:
    """Frozen before anything of ours runs there: no beat is due, only the answer is."""
    swarm = swarm_of((0, 4), (0, 4))
    first, second = swarm.servers.values()
    first.frozen = True
    busy = replace(second.core.heartbeat(), running=40)  # so that the frozen one is chosen
    swarm.core.receive(second.peer, busy, swarm.now)
    swarm.gateway.start("a", [5, 6, 7], 40, ahead=64)
    assert swarm.route("a") == [first]
    swarm.wait(0.5)
    assert swarm.route("a") == [second]
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 40)


def test_a_turn_is_not_refused_while_its_only_server_may_still_answer() -> None:
    swarm = swarm_of((0, 4))
    [only] = swarm.servers.values()
    only.frozen = True
    swarm.gateway.start("a", [5, 6, 7], 40, ahead=64)
    swarm.wait(2.0)
    assert not swarm.gateway.troubles("a")
    only.frozen = False
    swarm.run()
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 40)
