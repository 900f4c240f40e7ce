"""Which rows a step takes: decode first, prompts by age under the budget, nobody starves."""

from __future__ import annotations

import random
from bisect import bisect
from typing import Unpack

import pytest
from support.core.scripted_gateway import (
    GATEWAY,
    Client,
    ServerNetwork,
    make_clients,
    prompt,
    route,
    start_all,
)
from support.core.server import Options

from modelswarm.protocol.messages import Lane
from modelswarm_serving.core.stall_estimator import MIN_STALL, SAMPLE_SECONDS, StallEstimator
from modelswarm_serving.model.base import BatchItem


def sessions(
    network: ServerNetwork, lengths: list[int], hops: int = 1, **options: Unpack[Options]
) -> list[Client]:
    chosen: Options = {"total_pages": 2000, **options}
    return make_clients(network, route(network, hops, **chosen), lengths)


def steps(network: ServerNetwork, count: int) -> list[tuple[BatchItem, ...]]:
    (server,) = network.servers.values()
    out = []
    for _ in range(count):
        network.deliver_all()
        server.begin_step(network.now)
        out.append(server.works)
        server.end_step(network.now)
        network.deliver_all(to=GATEWAY)
    return out


def shape(work: tuple[BatchItem, ...]) -> list[tuple[int, int]]:
    return [(item.first, item.count) for item in work]


def test_prompts_are_taken_oldest_first_within_the_budget() -> None:
    network = ServerNetwork()
    start_all(sessions(network, [70, 50, 5], token_budget=64), 3)
    first, second, third = steps(network, 3)
    assert shape(first) == [(0, 64)]
    assert shape(second) == [(64, 6), (0, 50), (0, 5)]
    assert shape(third) == [(70, 1), (50, 1), (5, 1)]


def test_what_is_computed_again_comes_before_prompts_of_new_turns() -> None:
    network = ServerNetwork()
    *clients, fresh = sessions(network, [70, 50, 60, 5, 9], token_budget=64)
    for client in clients:
        client.fence(3, repair=client is clients[2])
    network.deliver_all()
    for client in clients:
        client.listen()
        client.go()
    assert [shape(work) for work in steps(network, 2)] == [[(0, 60), (0, 4)], [(60, 1), (4, 63)]]
    clients[1].fence()  # its turn had begun: a loop, for whatever reason
    network.deliver_all()
    clients[1].listen()
    clients[1].go()
    assert shape(steps(network, 1)[0]) == [(61, 1), (0, 50), (67, 3), (0, 5)]
    for client in clients:
        client.finish()
    clients[2].log += prompt(20)
    for client in (fresh, clients[2]):  # a next turn is one like any other
        client.fence(3)
    network.deliver_all()
    for client in (fresh, clients[2]):
        client.listen()
        client.go()
    assert [item.first for item in steps(network, 1)[0]] == [0, 62]


def test_decode_rows_come_first_and_a_prompt_still_gets_on() -> None:
    network = ServerNetwork()
    clients = sessions(network, [1] * 40 + [500], token_budget=48)
    start_all(clients[:40], 100)
    steps(network, 2)
    clients[40].fence(5)
    network.deliver_all()
    clients[40].listen()
    clients[40].go()
    (work,) = steps(network, 1)
    assert [item.count for item in work] == [1] * 40 + [32]
    done = steps(network, 16)
    assert all(len(item) == 41 for item in done)


def test_no_row_waits_for_more_than_a_round_of_the_others() -> None:
    network = ServerNetwork()
    clients = sessions(network, [1] * 10, token_budget=3)
    start_all(clients, 30)
    steps(network, 100)
    for client in clients:
        client.listen()
        assert len(client.tokens) == 30


def test_one_session_is_never_held_back() -> None:
    network = ServerNetwork()
    (client,) = sessions(network, [3], hops=3)
    client.start(10)
    client.finish()
    for server in network.servers.values():
        assert server.core.stats.steps == 10


def test_nothing_is_planned_while_a_step_is_out_or_nothing_is_ready() -> None:
    network = ServerNetwork()
    (client,) = sessions(network, [3])
    (server,) = network.servers.values()
    assert server.core.plan_step(0.0) == ()
    client.start(10)
    network.deliver_all()
    assert len(server.core.plan_step(0.0)) == 1
    assert server.core.plan_step(0.0) == ()


def test_beats_tell_steps_rows_pages_and_how_long_a_row_waits() -> None:
    network = ServerNetwork()
    (client,) = sessions(network, [3])
    (server,) = network.servers.values()
    client.start(2)
    network.deliver_all()
    network.tick(2.0)
    beat = server.core.heartbeat()
    assert (beat.steps, beat.rows, beat.sessions, beat.oldest_ready_ms) == (0, 0, 1, 2000.0)
    assert (beat.free_pages, beat.total_pages) == (1999, 2000)
    server.begin_step(network.now)
    server.end_step(network.now + 0.25)
    beat = server.core.heartbeat()
    assert (beat.steps, beat.rows, beat.step_ms, beat.oldest_ready_ms) == (1, 3, 250.0, 0.0)
    assert (beat.stepping_ms, beat.step_p99_ms) == (0.0, 250.0)


def test_a_server_that_is_stuck_in_one_step_shows_it_in_its_beats() -> None:
    network = ServerNetwork()
    (client,) = sessions(network, [3])
    (server,) = network.servers.values()
    client.start(2)
    network.deliver_all()
    server.begin_step(network.now)
    network.tick(7.0)
    beat = server.core.heartbeat()
    assert (beat.steps, beat.stepping_ms, beat.oldest_ready_ms) == (0, 7000.0, 7000.0)


def test_the_successor_need_not_be_told_of_every_token() -> None:
    network = ServerNetwork()
    (client,) = sessions(network, [3], hops=2, row_window=64)
    client.start(300)
    assert len(client.finish()) == 300
    back = [send for name, send in network.record if name == "s1/1/b" and send.to.peer == "s0/1/b"]
    windows = [send for send in back if type(send.item).__name__ == "Window"]
    assert 300 // 64 <= len(windows) <= 2 + 300 // 32
    assert all(send.lane is Lane.LIVE for send in windows)


def test_steps_count_for_longer_where_the_process_stands_still_between_them() -> None:
    """It gets 5 of every 100 ms, and its steps fit into them."""
    network = ServerNetwork()
    (client,) = sessions(network, [3])
    (server,) = network.servers.values()
    client.start(50)
    now = 0.0
    for _ in range(20):
        network.deliver_all()
        server.begin_step(now)
        server.end_step(now + 0.001)
        server.core.sample_stalls(now + 0.002, SAMPLE_SECONDS)
        now += 0.1
    beat = server.core.heartbeat()
    assert 5.0 < beat.busy_ms / beat.steps < 20.0
    assert beat.step_ms == pytest.approx(1.0), "deadlines go by the steps themselves"


def test_long_steps_are_no_stalls_and_failed_ones_neither() -> None:
    network = ServerNetwork()
    clients = sessions(network, [3, 3])
    (server,) = network.servers.values()
    start_all(clients, 50)
    network.deliver_all()
    core = server.core
    core.sample_stalls(0.0, SAMPLE_SECONDS)
    assert len(core.plan_step(0.0)) == 2
    core.sample_stalls(0.5, SAMPLE_SECONDS)
    core.fail_step("broken", 0.75)
    core.sample_stalls(0.76, SAMPLE_SECONDS)
    for now in (0.77, 1.04):  # each again, alone
        (task,) = core.plan_step(now)
        core.sample_stalls(now + 0.2, SAMPLE_SECONDS)
        core.finish_step(server.model.step((task,)), now + 0.25)
        core.sample_stalls(now + 0.26, SAMPLE_SECONDS)
    assert core.heartbeat().busy_ms == pytest.approx(500.0)


def test_a_loop_that_is_a_little_late_does_not_stall() -> None:
    stalls = StallEstimator()
    for number in range(100):
        stalls.sample(number * (SAMPLE_SECONDS + 0.9 * MIN_STALL), 0.0, SAMPLE_SECONDS)
    assert stalls.slowdown == 1.0


def told_beside(copies: bool) -> float:
    """What a step of 10 ms is told to take where the process stands still for 70 of every 100 ms, between such steps:
    in a step that copies, or in none."""
    stalls, now, told = StallEstimator(), 0.0, 0.0
    for _ in range(60):
        stalls.sample(now, 0.0, SAMPLE_SECONDS)
        told = stalls.scaled(0.01)
        now += SAMPLE_SECONDS
        stalls.sample(now, 0.0, SAMPLE_SECONDS)
        now += SAMPLE_SECONDS + 0.05
        if copies:  # it has ended when the loop looks
            stalls.discard_step()
        stalls.sample(now, 0.0, SAMPLE_SECONDS)
    return told


def test_a_stall_is_told_also_if_it_hits_a_copy() -> None:
    alone = told_beside(copies=False)
    assert alone > 0.02 and told_beside(copies=True) == pytest.approx(alone)


class Throttled:
    """The time of a process that stands still for a part of every 0.1 s or so."""

    def __init__(self, alive: float, seconds: float) -> None:
        rng, at = random.Random(1), 0.0
        self._stops: list[tuple[float, float]] = []
        while at < seconds + 10:
            stop = at + 0.1 * alive * rng.expovariate(1.0)
            at = stop + 0.1 * (1 - alive) * rng.uniform(0.5, 1.5)
            self._stops.append((stop, at))

    def done(self, at: float, work: float = 0.0) -> float:
        """When so many seconds of work are done that are begun at `at`, or as soon after as it runs."""
        for stop, end in self._stops[max(0, bisect(self._stops, (at, at)) - 1) :]:
            at = end if stop <= at < end else at
            if at + work < stop:
                break
            if at < stop:
                work, at = work - (stop - at), end
        return at + work


def told(alive: float, work: float, pause: float) -> float:
    """How many times longer steps are told to take there, than where it never stands still."""
    seconds, process, stalls = 60.0, Throttled(alive, 60.0), StallEstimator()
    began = ready = sum_told = 0.0
    ends, pulse, steps = process.done(0.0, work), SAMPLE_SECONDS, 0
    while ready < seconds:
        if pulse < ends:
            stalls.sample(pulse, max(0.0, pulse - began), SAMPLE_SECONDS)
            pulse = process.done(pulse + SAMPLE_SECONDS)
        else:
            sum_told, steps = sum_told + stalls.scaled(ends - began), steps + 1
            ready = ends + pause
            began = process.done(ready)
            ends = process.done(began, work)
    return sum_told / steps / work


@pytest.mark.parametrize("alive", [0.05, 0.3, 0.5, 0.8])
@pytest.mark.parametrize(
    ("work", "pause"), [(0.001, 0.02), (0.01, 0.01), (0.02, 0.001), (0.05, 0.05)]
)
def test_a_step_is_told_to_take_as_long_as_it_takes_there(
    alive: float, work: float, pause: float
) -> None:
    """However many there are, and whether stalls mostly hit them or the time between: never both at once."""
    assert 0.5 < alive * told(alive, work, pause) < 1.7


def test_a_long_outage_says_little_of_the_pace_after_it() -> None:
    stalls, now = StallEstimator(), 0.0
    for _ in range(100):
        now += SAMPLE_SECONDS
        stalls.sample(now, 0.0, SAMPLE_SECONDS)
    stalls.sample(now + 30.0, 0.0, SAMPLE_SECONDS)
    assert 1.0 < stalls.slowdown < 1.5


def test_an_old_stall_is_forgotten() -> None:
    stalls = StallEstimator()
    stalls.sample(0.0, 0.0, SAMPLE_SECONDS)
    stalls.sample(0.1, 0.0, SAMPLE_SECONDS)
    assert stalls.slowdown > 5.0
    for number in range(1, 400):
        stalls.sample(0.1 + number * SAMPLE_SECONDS, 0.0, SAMPLE_SECONDS)
    assert stalls.slowdown < 1.01
