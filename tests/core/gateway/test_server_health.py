"""Health: how servers are scored, compared, ejected and taken back; no clock, no processes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.core.peer_comparison import compare, slow
from support.core.review_swarm import MODEL, Server, Swarm, expected

from modelswarm.protocol.messages import Beat, Sampling
from modelswarm_gateway.core.detection.outlier_detector import FAR, SLOW
from modelswarm_gateway.core.interface.effects import Moved, Rerouted, TurnRequest
from modelswarm_gateway.core.servers.health import (
    EJECTION,
    LONGEST_EJECTION,
    REMEMBERED,
    SLOW_EJECTION,
    Health,
)
from modelswarm_gateway.core.servers.step_times import EVIDENCE, STALE, Pace


def test_a_server_that_nothing_is_known_about_does_well() -> None:
    standing = Health().standing("a", 5.0, hops=3)
    assert standing.score == 1.0 and not standing.ejected


def test_the_score_stays_in_its_range_whatever_happens() -> None:
    health, rng, now = Health(), random.Random(3), 0.0
    for _ in range(2000):
        now += rng.expovariate(1.0)
        match rng.randrange(4):
            case 0:
                health.strike("a", now)
            case 1:
                health.compared("a", rng.choice((0.1, 1.0, 3.0, 20.0)))
            case 2:
                health.beat("a", Beat(free_pages=rng.randrange(11), total_pages=10), now)
            case _:
                health.served("a", now)
        assert 0.0 < health.standing("a", now, hops=0).score <= 1.0


def test_what_makes_a_server_worse_lowers_its_score() -> None:
    health = Health()
    health.compared("slow", 4.0)
    health.beat("full", Beat(free_pages=0, total_pages=100), 0.0)
    health.strike("failed", 0.0)
    for peer in ("slow", "full", "failed"):
        assert health.standing(peer, 0.0, hops=0).score < 0.6
    assert health.standing("failed", 300.0, hops=0).score > 0.99, "errors are forgotten"


def test_a_small_difference_of_pace_is_none() -> None:
    health = Health()
    health.compared("a", 1.4)
    assert health.standing("a", 0.0, hops=0).score == 1.0


def test_an_ejection_is_short_doubles_and_is_capped() -> None:
    health, now, pauses = Health(), 100.0, []
    for _ in range(10):
        health.strike("a", now)
        until = health.ejected_until("a")
        pauses.append(until - now)
        now = until + 1.0
    assert pauses[:4] == [EJECTION, 2 * EJECTION, 4 * EJECTION, 8 * EJECTION]
    assert pauses[-1] == LONGEST_EJECTION


def test_the_faults_of_one_outage_count_once_and_old_ones_no_more() -> None:
    health = Health()
    for _ in range(8):
        health.strike("a", 10.0)
    assert health.ejected_until("a") == pytest.approx(10.0 + EJECTION)
    health.strike("a", 1000.0)
    assert health.ejected_until("a") == pytest.approx(1000.0 + EJECTION)


def test_one_canary_brings_an_ejected_server_back() -> None:
    health = Health()
    health.strike("a", 0.0)
    assert health.standing("a", 0.5 * EJECTION, hops=0).ejected
    health.served("a", 0.5 * EJECTION)
    later = 2 * EJECTION
    assert not health.standing("a", later, hops=0).ejected, "it may carry one"
    assert health.standing("a", later, hops=1).ejected, "and no more"
    health.served("a", later)
    assert not health.standing("a", later, hops=1).ejected
    assert not health.on_trial


def test_who_was_cut_off_and_is_back_carries_a_canary_first_and_keeps_its_faults() -> None:
    health = Health()
    health.strike("a", 0.0)
    health.leave("a")
    health.join("a")
    assert health.standing("a", 0.5 * EJECTION, hops=0).ejected, "a new link ends no ejection"
    assert health.standing("a", 2 * EJECTION, hops=0).canary
    assert health.standing("a", 2 * EJECTION, hops=1).ejected
    health.strike("a", 2 * EJECTION)
    assert health.ejected_until("a") == pytest.approx(4 * EJECTION)
    health.join("b")
    assert not health.standing("b", 0.0, hops=5).ejected, "nobody is new on trial"


def lived(health: Health, boots: list[float], *, as_said: bool = False) -> str:
    """Processes under one name that began at these times, of which each but the last has ended; the last one."""
    for number, now in enumerate(boots):
        if number:
            health.leave(f"s0/1/{number - 1}", as_said=as_said)
        health.join(f"s0/1/{number}", now)
    return f"s0/1/{len(boots) - 1}"


def test_a_server_that_died_twice_within_a_minute_is_dearer_and_carries_its_canary_first() -> None:
    health = Health()
    peer = lived(health, [0.0, 20.0, 40.0])
    standing = health.standing(peer, 40.0, hops=0)
    assert standing.score < 0.5 and standing.canary and not standing.ejected
    assert health.standing(peer, 40.0, hops=1).ejected, "one session, until that has a token"
    health.served(peer, 41.0)
    assert not health.standing(peer, 41.0, hops=1).ejected, "dear, not banned"
    assert health.standing(peer, 41.0, hops=1).score < 0.5
    assert health.standing(peer, 400.0, hops=1).score > 0.99, "and not for ever"


@pytest.mark.parametrize(
    ("boots", "as_said"),
    [([0.0, 20.0], False), ([0.0, 100.0, 300.0], False), ([0.0, 5.0, 10.0, 15.0], True)],
)
def test_a_restart_now_and_then_or_one_that_was_announced_is_no_fault(
    boots: list[float], as_said: bool
) -> None:
    health = Health()
    peer = lived(health, boots, as_said=as_said)
    standing = health.standing(peer, boots[-1], hops=0)
    assert standing.score == 1.0 and not standing.canary


def test_a_link_that_comes_and_goes_is_no_death() -> None:
    health = Health()
    for number in range(10):
        health.join("s0/1/a", float(number))
        assert health.standing("s0/1/a", float(number), hops=0).score == 1.0
        health.leave("s0/1/a")


def test_gone_servers_are_not_remembered_for_ever() -> None:
    health = Health()
    for number in range(3 * REMEMBERED):
        health.join(f"{number}")
        health.beat(f"{number}", Beat(), 0.0)
        health.leave(f"{number}")
        health.pace(f"{number}")
    assert len(health._gone) == REMEMBERED
    assert len(health._lives._last) == REMEMBERED
    assert not health._records and not health.on_trial


@pytest.mark.parametrize("what", ["slow", "full", "failed"])
def test_without_traffic_a_score_comes_back(what: str) -> None:
    """Nothing is asked of a server with a low score, so nothing else could tell that it is well."""
    health = Health()
    for number in range(5):
        beat = Beat(steps=number, rows=number, busy_ms=200 * number, total_pages=100)
        health.beat("a", replace(beat, free_pages=0 if what == "full" else 100), 0.1 * number)
    if what == "slow":
        health.compared("a", 20.0)
    if what == "failed":
        health.strike("a", 0.5)
    assert health.standing("a", 0.5, hops=0).score <= 0.5
    for second in range(1, 25):
        idle = Beat(steps=4, rows=4, busy_ms=800, free_pages=100, total_pages=100)
        health.beat("a", idle, 5.0 * second)
    assert health.standing("a", 120.0, hops=0).score >= 0.9


# ---- pace


def beaten(step: float, rows: int = 1, steps: int = 40) -> Pace:
    """A server that makes steps of so many rows, each in so many seconds."""
    pace = Pace()
    for number in range(steps + 1):
        busy = 1000 * step * number
        pace.beat(Beat(steps=number, rows=rows * number, busy_ms=busy, step_ms=1000 * step), 0.1)
    return pace


def test_pace_is_measured_per_block_and_size_of_step() -> None:
    assert beaten(0.02, rows=4).times(2, 1.0) == {2: pytest.approx(0.01)}
    assert beaten(0.5, rows=100).row == pytest.approx(0.005)


def test_few_steps_are_no_evidence_and_old_ones_neither() -> None:
    assert beaten(0.02, steps=EVIDENCE - 1).times(1, 1.0) == {}
    assert beaten(0.02).times(1, 1.0 + STALE + 1.0) == {}


def test_a_server_twenty_times_slower_than_its_like_is_slow() -> None:
    like = [beaten(0.01 + 0.001 * number).times(2, 1.0) for number in range(4)]
    compared = compare(beaten(0.2).times(2, 1.0), like)
    assert compared is not None and slow(compared) and compared.ratio > 15


def test_one_other_is_enough_to_compare_with() -> None:
    compared = compare({0: 0.2}, [{0: 0.01}])
    assert compared is not None and slow(compared)


def test_who_is_equally_slow_is_not_slow() -> None:
    compared = compare({0: 0.2}, [{0: 0.21}, {0: 0.19}, {0: 0.4}])
    assert compared is not None and not slow(compared)


def test_the_first_steps_of_a_process_say_nothing_of_its_pace() -> None:
    """Ten steps in a second, the first of which took nearly all of it, then some that take two milliseconds."""
    cold = Pace()
    for number, busy in enumerate((0.0, 900.0, 920.0, 940.0, 960.0)):
        beat = Beat(steps=10 * number, rows=10 * number, busy_ms=busy)
        cold.beat(beat, 0.1 * number)
    compared = compare(cold.times(2, 0.5), [beaten(0.002).times(2, 0.5)])
    assert compared is not None and compared.ratio == pytest.approx(1.0)


def test_steps_that_are_too_short_to_be_compared_are_alike() -> None:
    compared = compare({0: 0.00009}, [{0: 0.000001}])
    assert compared is not None and compared.ratio == 1.0


def test_large_steps_are_not_compared_with_small_ones() -> None:
    assert compare({8: 0.5}, [{0: 0.01}, {1: 0.01}]) is None
    compared = compare({0: 0.01, 8: 0.5, 1: 0.012}, [{0: 0.01, 1: 0.012}])
    assert compared is not None and not slow(compared)


def test_small_steps_that_take_longer_than_large_ones_of_others_are_slow() -> None:
    """Where there are none of the same size: so many rows more take no less."""
    compared = compare({0: 0.2}, [{3: 0.02}, {2: 0.01, 9: 9.0}])
    assert compared is not None and slow(compared)
    assert compared.ratio == pytest.approx(0.2 / 0.015)
    compared = compare({0: 0.01}, [{3: 0.2}])
    assert compared is not None and not slow(compared)
    same = compare({0: 0.2}, [{0: 0.19}, {3: 0.01}])
    assert same is not None and same.ratio == pytest.approx(0.2 / 0.19), "the same size says more"


def test_half_of_the_others_may_be_out_of_their_minds() -> None:
    compared = compare({0: 0.01}, [{0: 0.011}, {0: 0.012}, {0: 0.00001}, {0: 0.00001}])
    assert compared is not None
    assert compared.ratio < SLOW and compared.deviations < FAR, "neither of the two measures"


# ---- in the core


def beat_all(swarm: Swarm, paces: dict[str, float], seconds: float) -> None:
    """All servers say that they step all the time, each at its pace."""
    for _ in range(round(seconds / 0.1)):
        swarm.now += 0.1
        for server in swarm.servers.values():
            pace = paces.get(server.peer, 0.01)
            done = swarm.now / pace
            beat = Beat(steps=int(done), rows=int(done), busy_ms=1000 * pace * int(done))
            swarm.core.receive(server.peer, beat, swarm.now)
        swarm.core.tick(swarm.now)
        swarm.run()


def swarm_of_four() -> Swarm:
    swarm = Swarm()
    for first, last in ((0, 2), (0, 2), (2, 4), (2, 4)):
        swarm.serve(first, last)
    return swarm


def started(swarm: Swarm) -> list[Server]:
    swarm.core.open("a", MODEL, swarm.now)
    request = TurnRequest((5, 6, 7), 60, Sampling(), credit_ahead=4)
    swarm.core.turn("a", request, swarm.now)
    swarm.run()
    return route(swarm)


def route(swarm: Swarm) -> list[Server]:
    view = swarm.core.session("a")
    assert view is not None
    return [swarm.servers[hop.peer] for hop in view.route]


def ejected(swarm: Swarm) -> list[str]:
    fleet = swarm.core._fleet
    return [peer for peer in swarm.servers if fleet.standing(peer, swarm.now).ejected]


def test_a_server_that_keeps_dying_is_on_trial_with_each_new_life() -> None:
    swarm = Swarm()
    first, _ = swarm.serve(0, 4), swarm.serve(0, 4)
    for boot in "cd":
        swarm.kill(first)
        hello = replace(first.hello, peer=first.peer[:-1] + boot)
        first = swarm.servers[hello.peer] = replace(first, hello=hello)
        swarm.now += 5.0
        swarm.link(first)
    standing = swarm.core._fleet.standing(first.peer, swarm.now)
    assert standing.canary and standing.score < 0.5


@pytest.mark.parametrize("place", [0, 1])
def test_a_slow_server_is_moved_away_from_without_a_fault(place: int) -> None:
    swarm = swarm_of_four()
    slow = started(swarm)[place]
    beat_all(swarm, {slow.peer: 0.2}, 6.0)
    assert slow not in route(swarm)
    assert ejected(swarm) == [slow.peer]
    assert [effect.why for effect in swarm.effects if isinstance(effect, Moved)] == ["slow"]
    assert not [effect for effect in swarm.effects if isinstance(effect, Rerouted)]
    swarm.core.read_to("a", 1000, swarm.now)
    swarm.run()
    assert swarm.answer("a") == expected([5, 6, 7], 60)


def test_a_server_that_got_well_comes_back() -> None:
    swarm = swarm_of_four()
    slow = started(swarm)[0]
    beat_all(swarm, {slow.peer: 0.2}, 6.0)
    assert ejected(swarm) == [slow.peer]
    beat_all(swarm, {}, SLOW_EJECTION + 5.0)
    assert ejected(swarm) == []
    assert not swarm.core._fleet.left


def test_a_few_slow_beats_of_a_server_that_then_idles_are_looked_at_once() -> None:
    swarm = swarm_of_four()
    slow = started(swarm)[0]
    for steps in (0, 2, 4, 6):
        last = Beat(steps=steps, rows=steps, busy_ms=200 * steps)
        swarm.core.receive(slow.peer, last, swarm.now)
    scores = []
    for number in range(100):
        swarm.now += 0.1
        for server in swarm.servers.values():
            beat = last if server is slow else Beat(steps=number, rows=number, busy_ms=10 * number)
            swarm.core.receive(server.peer, beat, swarm.now)
        swarm.core.tick(swarm.now)
        swarm.run()
        scores.append(swarm.core._fleet.standing(slow.peer, swarm.now).score)
        assert ejected(swarm) == []
    assert min(scores) < 0.5, "it was seen to be slow"


def test_nobody_is_ejected_when_all_are_slow() -> None:
    swarm = swarm_of_four()
    started(swarm)
    beat_all(swarm, dict.fromkeys(swarm.servers, 0.01), 3.0)
    beat_all(swarm, dict.fromkeys(swarm.servers, 0.2), 20.0)
    assert ejected(swarm) == []
    assert not [effect for effect in swarm.effects if isinstance(effect, Moved | Rerouted)]


def test_an_ejection_never_uncovers_a_block() -> None:
    swarm = Swarm()
    for first, last in ((0, 2), (2, 4), (1, 3)):
        swarm.serve(first, last)
    slow = started(swarm)
    beat_all(swarm, {slow[0].peer: 0.2}, 20.0)
    assert ejected(swarm) == []


def test_two_servers_that_are_slow_at_once_are_not_both_ejected_from_their_blocks() -> None:
    swarm = Swarm()
    for first, last in ((0, 2), (0, 2), (2, 4), (2, 4), (2, 4), (4, 6)):
        swarm.serve(first, last, n_blocks=6)
    slow = [peer for peer, server in swarm.servers.items() if server.hello.first == 0]
    beat_all(swarm, dict.fromkeys(slow, 0.2), 6.0)
    assert len(ejected(swarm)) == 1 and ejected(swarm)[0] in slow
    started(swarm)
    assert swarm.core._fleet.uncovered(MODEL) == []


def test_sessions_that_rest_on_a_server_do_not_keep_it_from_its_canary() -> None:
    """Their turns are over: no token of theirs will ever show that it is well again."""
    swarm = Swarm()
    swarm.serve(0, 4)
    for number in range(3):
        swarm.core.open(f"old{number}", MODEL, swarm.now)
        swarm.ask(f"old{number}", [5, 6, 7], 3)
    [server] = swarm.servers.values()
    swarm.core._fleet.blame(server.peer, "overdue", swarm.now)
    beat_all(swarm, {}, 2 * EJECTION)
    assert ejected(swarm) == []
    started(swarm)
    beat_all(swarm, {}, 0.1)
    assert not swarm.core._fleet.on_trial, "it brought a token"


def test_a_canary_whose_reader_sleeps_makes_room_for_another() -> None:
    swarm = Swarm()
    server = swarm.serve(0, 4)
    started(swarm)
    swarm.core._fleet.blame(server.peer, "overdue", swarm.now)
    beat_all(swarm, {}, 2 * EJECTION)
    assert ejected(swarm) == [], "the session that runs there waits for its reader"
