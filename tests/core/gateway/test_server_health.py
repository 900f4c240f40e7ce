"""Server health: scores, comparison of step times, ejection and return. Time is virtual."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from support.core.gateway import TWICE, Swarm, swarm_of
from support.core.peer_comparison import compare, slow
from support.core.server import MODEL, Server, expected

from modelswarm.protocol.identity import Epoch
from modelswarm.protocol.messages import FenceAck, Heartbeat
from modelswarm_gateway.core.detection.outlier_detector import MIN_DEVIATIONS, MIN_RATIO
from modelswarm_gateway.core.detection.peer_comparison import PeerGroup
from modelswarm_gateway.core.interface.effects import MigrationEnded, Rerouted
from modelswarm_gateway.core.servers.health import (
    BASE_EJECTION_TIME,
    MAX_DISCONNECTED,
    MAX_EJECTION_TIME,
    SLOW_EJECTION_TIME,
    HealthTable,
)
from modelswarm_gateway.core.servers.step_times import (
    MAX_AGE,
    MAX_SAMPLES,
    MIN_STEPS,
    StepCost,
    StepTimes,
)


def test_unknown_server_is_healthy() -> None:
    standing = HealthTable().status("a", 5.0, hops=3)
    assert standing.score == 1.0 and not standing.ejected


def test_score_stays_within_its_range() -> None:
    health, rng, now = HealthTable(), random.Random(3), 0.0
    for _ in range(2000):
        now += rng.expovariate(1.0)
        match rng.randrange(4):
            case 0:
                health.eject("a", now)
            case 1:
                health.set_slowness("a", rng.choice((0.1, 1.0, 3.0, 20.0)))
            case 2:
                health.record_heartbeat(
                    "a", Heartbeat(free_pages=rng.randrange(11), total_pages=10), now
                )
            case _:
                health.on_token("a", now)
        assert 0.0 < health.status("a", now, hops=0).score <= 1.0


def test_slowness_full_pages_and_errors_lower_the_score() -> None:
    health = HealthTable()
    health.set_slowness("slow", 4.0)
    health.record_heartbeat("full", Heartbeat(free_pages=0, total_pages=100), 0.0)
    health.eject("failed", 0.0)
    for peer in ("slow", "full", "failed"):
        assert health.status(peer, 0.0, hops=0).score < 0.6
    assert health.status("failed", 300.0, hops=0).score > 0.99, "errors are forgotten"


def test_small_slowness_does_not_lower_the_score() -> None:
    health = HealthTable()
    health.set_slowness("a", 1.4)
    assert health.status("a", 0.0, hops=0).score == 1.0


def test_ejection_time_doubles_up_to_its_maximum() -> None:
    health, now, pauses = HealthTable(), 100.0, []
    for _ in range(10):
        health.eject("a", now)
        until = health.ejected_until("a")
        pauses.append(until - now)
        now = until + 1.0
    assert pauses[:4] == [
        BASE_EJECTION_TIME,
        2 * BASE_EJECTION_TIME,
        4 * BASE_EJECTION_TIME,
        8 * BASE_EJECTION_TIME,
    ]
    assert pauses[-1] == MAX_EJECTION_TIME


def test_faults_of_one_outage_count_once_and_expire() -> None:
    health = HealthTable()
    for _ in range(8):
        health.eject("a", 10.0)
    assert health.ejected_until("a") == pytest.approx(10.0 + BASE_EJECTION_TIME)
    health.eject("a", 1000.0)
    assert health.ejected_until("a") == pytest.approx(1000.0 + BASE_EJECTION_TIME)


def test_ejected_server_returns_after_one_canary() -> None:
    health = HealthTable()
    health.eject("a", 0.0)
    assert health.status("a", 0.5 * BASE_EJECTION_TIME, hops=0).ejected
    health.on_token("a", 0.5 * BASE_EJECTION_TIME)
    later = 2 * BASE_EJECTION_TIME
    assert not health.status("a", later, hops=0).ejected, "it may get one session"
    assert health.status("a", later, hops=1).ejected, "and no second one"
    health.on_token("a", later)
    assert not health.status("a", later, hops=1).ejected
    assert not health.on_canary


def test_reconnected_server_needs_canary_and_keeps_its_errors() -> None:
    health = HealthTable()
    health.eject("a", 0.0)
    health.remove_server("a")
    health.add_server("a")
    assert health.status("a", 0.5 * BASE_EJECTION_TIME, hops=0).ejected, (
        "a new link ends no ejection"
    )
    assert health.status("a", 2 * BASE_EJECTION_TIME, hops=0).canary
    assert health.status("a", 2 * BASE_EJECTION_TIME, hops=1).ejected
    health.eject("a", 2 * BASE_EJECTION_TIME)
    assert health.ejected_until("a") == pytest.approx(4 * BASE_EJECTION_TIME)
    health.add_server("b")
    assert not health.status("b", 0.0, hops=5).ejected, "a new server needs no canary"


def restart_server(health: HealthTable, boots: list[float], *, announced: bool = False) -> str:
    """Start processes under one name at these times, end all but the last, and return the peer of the last one."""
    for number, now in enumerate(boots):
        if number:
            health.remove_server(f"s0/1/{number - 1}", announced=announced)
        health.add_server(f"s0/1/{number}", now)
    return f"s0/1/{len(boots) - 1}"


def test_server_that_crashed_twice_has_low_score_and_canary() -> None:
    health = HealthTable()
    peer = restart_server(health, [0.0, 20.0, 40.0])
    standing = health.status(peer, 40.0, hops=0)
    assert standing.score < 0.5 and standing.canary and not standing.ejected
    assert health.status(peer, 40.0, hops=1).ejected, (
        "no second session before a token of the canary"
    )
    health.on_token(peer, 41.0)
    assert not health.status(peer, 41.0, hops=1).ejected, "expensive, not banned"
    assert health.status(peer, 41.0, hops=1).score < 0.5
    assert health.status(peer, 400.0, hops=1).score > 0.99, "the low score expires"


@pytest.mark.parametrize(
    ("boots", "announced"),
    [([0.0, 20.0], False), ([0.0, 100.0, 300.0], False), ([0.0, 5.0, 10.0, 15.0], True)],
)
def test_rare_or_announced_restarts_do_not_lower_the_score(
    boots: list[float], announced: bool
) -> None:
    health = HealthTable()
    peer = restart_server(health, boots, announced=announced)
    standing = health.status(peer, boots[-1], hops=0)
    assert standing.score == 1.0 and not standing.canary


def test_reconnecting_link_does_not_count_as_crash() -> None:
    health = HealthTable()
    for number in range(10):
        health.add_server("s0/1/a", float(number))
        assert health.status("s0/1/a", float(number), hops=0).score == 1.0
        health.remove_server("s0/1/a")


def test_disconnected_servers_are_forgotten_beyond_a_limit() -> None:
    health = HealthTable()
    for number in range(3 * MAX_DISCONNECTED):
        health.add_server(f"{number}")
        health.record_heartbeat(f"{number}", Heartbeat(), 0.0)
        health.remove_server(f"{number}")
        health.step_times(f"{number}")
    assert len(health._disconnected) == MAX_DISCONNECTED
    assert len(health._crashes._last) == MAX_DISCONNECTED
    assert not health._records and not health.on_canary


@pytest.mark.parametrize("what", ["slow", "full", "failed"])
def test_low_score_recovers_without_traffic(what: str) -> None:
    """A server with a low score gets no sessions, so no token could show that it is healthy."""
    health = HealthTable()
    for number in range(5):
        heartbeat = Heartbeat(steps=number, rows=number, busy_ms=200 * number, total_pages=100)
        health.record_heartbeat(
            "a", replace(heartbeat, free_pages=0 if what == "full" else 100), 0.1 * number
        )
    if what == "slow":
        health.set_slowness("a", 20.0)
    if what == "failed":
        health.eject("a", 0.5)
    assert health.status("a", 0.5, hops=0).score <= 0.5
    for second in range(1, 25):
        idle = Heartbeat(steps=4, rows=4, busy_ms=800, free_pages=100, total_pages=100)
        health.record_heartbeat("a", idle, 5.0 * second)
    assert health.status("a", 120.0, hops=0).score >= 0.9


# ---- step times


def measured_times(step: float, rows: int = 1, steps: int = 40) -> StepTimes:
    """Return the step times of a server that runs steps of `rows` rows, each in `step` seconds."""
    pace = StepTimes()
    for number in range(steps + 1):
        busy = 1000 * step * number
        pace.record_heartbeat(
            Heartbeat(
                steps=number,
                rows=rows * number,
                busy_ms=busy,
                step_ms=1000 * step,
                read_bytes=1_000_000 * number,
            ),
            0.1,
        )
    return pace


def test_step_time_is_kept_per_block_and_step_size() -> None:
    costs = measured_times(0.02, rows=4).per_block(2, 1.0)
    assert list(costs) == [2] and costs[2] == pytest.approx((0.01, 1e6))
    assert measured_times(0.5, rows=100).prefill_seconds_per_row == pytest.approx(0.005)


def test_few_or_old_steps_give_no_step_time() -> None:
    assert measured_times(0.02, steps=MIN_STEPS - 1).per_block(1, 1.0) == {}
    assert measured_times(0.02).per_block(1, 1.0 + MAX_AGE + 1.0) == {}


def test_server_twenty_times_slower_than_replicas_is_slow() -> None:
    like = [measured_times(0.01 + 0.001 * number).per_block(2, 1.0) for number in range(4)]
    compared = compare(measured_times(0.2).per_block(2, 1.0), like)
    assert compared is not None and slow(compared) and compared.ratio > 15


def test_one_replica_is_enough_for_comparison() -> None:
    compared = compare({0: 0.2}, [{0: 0.01}])
    assert compared is not None and slow(compared)


def test_equally_slow_servers_are_not_slow() -> None:
    compared = compare({0: 0.2}, [{0: 0.21}, {0: 0.19}, {0: 0.4}])
    assert compared is not None and not slow(compared)


def test_step_that_only_a_fence_ack_tells_of_is_progress() -> None:
    times, epoch = StepTimes(), Epoch(1, 1)
    times.record_heartbeat(Heartbeat(steps=3), 0.0)
    times.record_fence_ack(FenceAck(1, 1, epoch, steps=3), 20.0)
    assert not times.is_progressing(20.0)
    times.record_fence_ack(FenceAck(1, 1, epoch, steps=4), 20.0)
    assert times.is_progressing(20.0)


def test_cold_start_steps_do_not_count() -> None:
    """Ten steps take 0.9 s, nearly all of it in the first one. Later steps take two milliseconds."""
    cold = StepTimes()
    for number, busy in enumerate((0.0, 900.0, 920.0, 940.0, 960.0)):
        heartbeat = Heartbeat(steps=10 * number, rows=10 * number, busy_ms=busy)
        cold.record_heartbeat(heartbeat, 0.1 * number)
    compared = compare(cold.per_block(2, 0.5), [measured_times(0.002).per_block(2, 0.5)])
    assert compared is not None and compared.ratio == pytest.approx(1.0)


def test_very_short_steps_compare_as_equal() -> None:
    compared = compare({0: 0.00009}, [{0: 0.000001}])
    assert compared is not None and compared.ratio == 1.0


def test_large_steps_are_not_compared_with_small_steps() -> None:
    assert compare({8: 0.5}, [{0: 0.01}, {1: 0.01}]) is None
    compared = compare({0: 0.01, 8: 0.5, 1: 0.012}, [{0: 0.01, 1: 0.012}])
    assert compared is not None and not slow(compared)


def test_small_steps_longer_than_large_steps_are_slow() -> None:
    """Without steps of the same size: more rows never take less time."""
    compared = compare({0: 0.2}, [{3: 0.02}, {2: 0.01, 9: 9.0}])
    assert compared is not None and slow(compared)
    assert compared.ratio == pytest.approx(0.2 / 0.015)
    compared = compare({0: 0.01}, [{3: 0.2}])
    assert compared is not None and not slow(compared)
    same = compare({0: 0.2}, [{0: 0.19}, {3: 0.01}])
    assert same is not None and same.ratio == pytest.approx(0.2 / 0.19), (
        "steps of the same size take precedence"
    )


def test_longer_steps_with_longer_contexts_are_not_slow() -> None:
    short = [{0: StepCost(0.004, 1e6)}, {0: StepCost(0.006, 1e6)}]
    compared = compare({0: StepCost(0.06, 10e6)}, short)
    assert compared is not None and not slow(compared)
    assert compared.ratio == pytest.approx(0.006 / 0.005)
    compared = compare({0: StepCost(0.06, 2e6)}, short)
    assert compared is not None and slow(compared), "twice as long contexts explain a factor of two"


def test_shorter_contexts_do_not_make_a_server_slow() -> None:
    """Steps of a small model take as long with short contexts."""
    compared = compare({0: StepCost(0.01, 1e6)}, [{0: StepCost(0.012, 50e6)}])
    assert compared is not None and compared.ratio < 1.0


@pytest.mark.parametrize(("read_bytes", "is_suspected"), [(6e6, False), (1e6, True)])
def test_own_baseline_grows_with_contexts(read_bytes: float, is_suspected: bool) -> None:
    """The server was healthy among its peers; now it is the only one with steps, which take six times as long."""
    group = PeerGroup()
    for peer in ("s", "t"):
        group.add_peer(peer)
        group.set_costs(peer, {0: StepCost(0.01, 1e6)}, math.inf)
    none = np.zeros(len(group.peers), dtype=np.bool_)
    assert not group.compare_with_baseline(group.compare(), none, MIN_RATIO).any()
    group.remove_peer("t")
    group.set_costs("s", {0: StepCost(0.06, read_bytes)}, math.inf)
    found = group.compare_with_baseline(group.compare(), none, MIN_RATIO)
    assert group.peers_at(found) == (["s"] if is_suspected else [])


def test_short_steps_lower_the_baseline() -> None:
    group = PeerGroup()
    group.add_peer("s")
    none = np.zeros(len(group.peers), dtype=np.bool_)
    for seconds, is_suspected in ((0.01, False), (0.002, False), (0.012, True)):
        group.set_costs("s", {0: StepCost(seconds, 1e6)}, math.inf)
        found = group.compare_with_baseline(group.compare(), none, MIN_RATIO)
        assert group.peers_at(found) == (["s"] if is_suspected else [])


@pytest.mark.parametrize(("last", "is_slow"), [((0.006, 1e6), False), ((0.06, 10e6), True)])
def test_one_heartbeat_decides_neither_times_nor_bytes(
    last: tuple[float, float], is_slow: bool
) -> None:
    """Nine heartbeats of another load come before: of a long session, or of a slow server."""
    before = (0.06, 1e6) if is_slow else (0.06, 10e6)
    times, heartbeat = StepTimes(), Heartbeat()
    times.record_heartbeat(heartbeat, 0.0)
    for seconds, read in [before] * MAX_SAMPLES + [last]:
        heartbeat = replace(
            heartbeat,
            steps=heartbeat.steps + 5,
            rows=heartbeat.rows + 5,
            busy_ms=heartbeat.busy_ms + 5000 * seconds,
            read_bytes=heartbeat.read_bytes + 5 * read,
        )
        times.record_heartbeat(heartbeat, 0.1)
    compared = compare(times.per_block(1, 1.0), [{0: StepCost(0.006, 1e6)}])
    assert compared is not None and slow(compared) == is_slow


def test_comparison_tolerates_half_of_replicas_being_wrong() -> None:
    compared = compare({0: 0.01}, [{0: 0.011}, {0: 0.012}, {0: 0.00001}, {0: 0.00001}])
    assert compared is not None
    assert compared.ratio < MIN_RATIO and compared.deviations < MIN_DEVIATIONS, (
        "neither of the two measures"
    )


# ---- in the core


def send_heartbeats(swarm: Swarm, paces: dict[str, float], seconds: float) -> None:
    """Feed heartbeats of servers that step all the time, each with its step time."""
    for _ in range(round(seconds / 0.1)):
        swarm.now += 0.1
        for server in swarm.servers.values():
            pace = paces.get(server.peer, 0.01)
            done = swarm.now / pace
            heartbeat = Heartbeat(steps=int(done), rows=int(done), busy_ms=1000 * pace * int(done))
            swarm.core.receive(server.peer, heartbeat, swarm.now)
        swarm.core.tick(swarm.now)
        swarm.run()


def started(swarm: Swarm) -> list[Server]:
    swarm.gateway.start("a", [5, 6, 7], 60, ahead=4)
    return swarm.route("a")


def ejected(swarm: Swarm) -> list[str]:
    registry = swarm.core._registry
    return [peer for peer in swarm.servers if registry.health_status(peer, swarm.now).ejected]


def test_repeatedly_crashing_server_needs_a_canary() -> None:
    swarm = Swarm()
    first, _ = swarm.serve(0, 4), swarm.serve(0, 4)
    for boot in "cd":
        swarm.kill(first.peer)
        hello = replace(first.hello, peer=first.peer[:-1] + boot)
        swarm.now += 5.0
        first = swarm.join(replace(first, hello=hello))
    standing = swarm.core._registry.health_status(first.peer, swarm.now)
    assert standing.canary and standing.score < 0.5


@pytest.mark.parametrize("place", [0, 1])
def test_sessions_migrate_from_slow_server_without_rerouting(place: int) -> None:
    swarm = swarm_of(*TWICE)
    slow = started(swarm)[place]
    send_heartbeats(swarm, {slow.peer: 0.2}, 6.0)
    assert slow not in swarm.route("a")
    assert ejected(swarm) == [slow.peer]
    assert [effect.cause for effect in swarm.gateway.all(MigrationEnded)] == ["slow"]
    assert not swarm.gateway.all(Rerouted)
    swarm.gateway.read("a", 1000)
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 60)


def test_ejected_slow_server_returns_after_it_recovers() -> None:
    swarm = swarm_of(*TWICE)
    slow = started(swarm)[0]
    send_heartbeats(swarm, {slow.peer: 0.2}, 6.0)
    assert ejected(swarm) == [slow.peer]
    send_heartbeats(swarm, {}, SLOW_EJECTION_TIME + 5.0)
    assert ejected(swarm) == []
    assert not swarm.core._registry.drains.peers


def test_few_slow_heartbeats_lower_score_without_ejection() -> None:
    swarm = swarm_of(*TWICE)
    slow = started(swarm)[0]
    for steps in (0, 2, 4, 6):
        last = Heartbeat(steps=steps, rows=steps, busy_ms=200 * steps)
        swarm.core.receive(slow.peer, last, swarm.now)
    scores = []
    for number in range(100):
        swarm.now += 0.1
        for server in swarm.servers.values():
            heartbeat = (
                last
                if server is slow
                else Heartbeat(steps=number, rows=number, busy_ms=10 * number)
            )
            swarm.core.receive(server.peer, heartbeat, swarm.now)
        swarm.core.tick(swarm.now)
        swarm.run()
        scores.append(swarm.core._registry.health_status(slow.peer, swarm.now).score)
        assert ejected(swarm) == []
    assert min(scores) < 0.5, "its score was low once"


def test_no_server_is_ejected_when_all_are_slow() -> None:
    swarm = swarm_of(*TWICE)
    started(swarm)
    send_heartbeats(swarm, dict.fromkeys(swarm.servers, 0.01), 3.0)
    send_heartbeats(swarm, dict.fromkeys(swarm.servers, 0.2), 20.0)
    assert ejected(swarm) == []
    assert not [effect for effect in swarm.effects if isinstance(effect, MigrationEnded | Rerouted)]


def test_ejection_never_uncovers_a_block() -> None:
    swarm = swarm_of((0, 2), (2, 4), (1, 3))
    slow = started(swarm)
    send_heartbeats(swarm, {slow[0].peer: 0.2}, 20.0)
    assert ejected(swarm) == []


def test_only_one_of_two_slow_replicas_is_ejected() -> None:
    swarm = swarm_of((0, 2), (0, 2), (2, 4), (2, 4), (2, 4), (4, 6), n_blocks=6)
    slow = [peer for peer, server in swarm.servers.items() if server.hello.first == 0]
    send_heartbeats(swarm, dict.fromkeys(slow, 0.2), 6.0)
    assert len(ejected(swarm)) == 1 and ejected(swarm)[0] in slow
    started(swarm)
    assert swarm.core._registry.uncovered_blocks(MODEL) == []


def test_parked_sessions_do_not_block_the_canary() -> None:
    """The turns of parked sessions are over, so no token of theirs will show that the server is healthy."""
    swarm = Swarm()
    swarm.serve(0, 4)
    for number in range(3):
        swarm.core.open_session(f"old{number}", MODEL, swarm.now)
        swarm.gateway.clear_and_start(f"old{number}", [5, 6, 7], 3)
    [server] = swarm.servers.values()
    swarm.core._registry.eject(server.peer, "overdue", swarm.now)
    send_heartbeats(swarm, {}, 2 * BASE_EJECTION_TIME)
    assert ejected(swarm) == []
    started(swarm)
    send_heartbeats(swarm, {}, 0.1)
    assert not swarm.core._registry.health.on_canary, "the canary has a token"


def test_session_waiting_for_its_reader_blocks_no_canary() -> None:
    swarm = Swarm()
    server = swarm.serve(0, 4)
    started(swarm)
    swarm.core._registry.eject(server.peer, "overdue", swarm.now)
    send_heartbeats(swarm, {}, 2 * BASE_EJECTION_TIME)
    assert ejected(swarm) == [], "the session that runs there waits for its reader"
