"""Health: how servers are scored, compared, ejected and taken back; no clock, no processes."""

from __future__ import annotations

import random

import pytest
from protocol.review_swarm import MODEL, Server, Swarm, expected

from modelswarm.protocol.messages import Beat, Sampling
from modelswarm_gateway.core.effects import Moved, Rerouted, TurnRequest
from modelswarm_gateway.core.health import EJECTION, LONGEST_EJECTION, SLOW_EJECTION, Health
from modelswarm_gateway.core.pace import EVIDENCE, STALE, Pace
from modelswarm_gateway.core.slowness import compare


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
    assert compared is not None and compared.slow and compared.ratio > 15


def test_one_other_is_enough_to_compare_with() -> None:
    compared = compare({0: 0.2}, [{0: 0.01}])
    assert compared is not None and compared.slow


def test_who_is_equally_slow_is_not_slow() -> None:
    compared = compare({0: 0.2}, [{0: 0.21}, {0: 0.19}, {0: 0.4}])
    assert compared is not None and not compared.slow


def test_large_steps_are_not_compared_with_small_ones() -> None:
    assert compare({8: 0.5}, [{0: 0.01}, {1: 0.01}]) is None
    compared = compare({0: 0.01, 8: 0.5, 1: 0.012}, [{0: 0.01, 1: 0.012}])
    assert compared is not None and not compared.slow


def test_half_of_the_others_may_be_out_of_their_minds() -> None:
    compared = compare({0: 0.01}, [{0: 0.011}, {0: 0.012}, {0: 0.00001}, {0: 0.00001}])
    assert compared is None or not compared.slow


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
