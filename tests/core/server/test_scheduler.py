"""Rows of a step: decode rows first, prompts by age within the token budget, no starvation."""

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


def test_prompts_are_scheduled_oldest_first_within_budget() -> None:
    network = ServerNetwork()
    start_all(sessions(network, [70, 50, 5], token_budget=64), 3)
    first, second, third = steps(network, 3)
    assert shape(first) == [(0, 64)]
    assert shape(second) == [(64, 6), (0, 50), (0, 5)]
    assert shape(third) == [(70, 1), (50, 1), (5, 1)]


def test_recovery_prefill_comes_before_new_prompts() -> None:
    network = ServerNetwork()
    *clients, fresh = sessions(network, [70, 50, 60, 5, 9], token_budget=64)
    for client in clients:
        client.fence(3, repair=client is clients[2])
    network.deliver_all()
    for client in clients:
        client.listen()
        client.go()
    assert [shape(work) for work in steps(network, 2)] == [[(0, 60), (0, 4)], [(60, 1), (4, 63)]]
    clients[1].fence()  # its turn had begun, so this is a recovery
    network.deliver_all()
    clients[1].listen()
    clients[1].go()
    assert shape(steps(network, 1)[0]) == [(61, 1), (0, 50), (67, 3), (0, 5)]
    for client in clients:
        client.finish()
    clients[2].log += prompt(20)
    for client in (fresh, clients[2]):  # the next turn of a session is a new turn
        client.fence(3)
    network.deliver_all()
    for client in (fresh, clients[2]):
        client.listen()
        client.go()
    assert [item.first for item in steps(network, 1)[0]] == [0, 62]


def test_hops_of_a_new_prompt_compute_at_the_same_time() -> None:
    network = ServerNetwork()
    options: Options = {"token_budget": 64, "pipeline_rows": 16, "row_window": 32}
    (client,) = sessions(network, [80], hops=2, **options)
    client.fence(3)
    network.deliver_all()
    client.listen()
    client.go()
    both = 0
    shapes: list[list[list[tuple[int, int]]]] = [[], []]
    for _ in range(8):
        network.deliver_all()
        running = 0
        for number, server in enumerate(network.servers.values()):
            server.begin_step(network.now)
            shapes[number].append(shape(server.works))
            running += bool(server.works)
        both += running == 2
        for server in network.servers.values():
            server.end_step(network.now)
    assert [each for each in shapes[0] if each][:5] == [[(at, 16)] for at in range(0, 80, 16)]
    assert both >= 4


def test_recovery_of_a_hop_runs_in_steps_of_the_whole_budget() -> None:
    network = ServerNetwork()
    (client,) = sessions(network, [80], hops=2, token_budget=64, pipeline_rows=16)
    head, _ = network.servers.values()
    client.fence(3)
    for wanted in ((0, 16), (16, 64)):
        network.deliver_all()
        client.listen()
        client.go()
        network.deliver_all()
        head.begin_step(network.now)
        assert shape(head.works) == [wanted]
        head.end_step(network.now)
        client.fence()  # its turn has begun, so this is a recovery


def test_decode_rows_come_first_without_starving_prefill() -> None:
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


def test_sessions_beyond_token_budget_share_steps_evenly() -> None:
    network = ServerNetwork()
    clients = sessions(network, [1] * 10, token_budget=3)
    start_all(clients, 30)
    steps(network, 100)
    for client in clients:
        client.listen()
        assert len(client.tokens) == 30


def test_single_session_runs_one_step_per_token() -> None:
    network = ServerNetwork()
    (client,) = sessions(network, [3], hops=3)
    client.start(10)
    client.finish()
    for server in network.servers.values():
        assert server.core.stats.steps == 10


def test_plan_is_empty_while_step_runs_or_no_row_is_ready() -> None:
    network = ServerNetwork()
    (client,) = sessions(network, [3])
    (server,) = network.servers.values()
    assert server.core.plan_step(0.0) == ()
    client.start(10)
    network.deliver_all()
    assert len(server.core.plan_step(0.0)) == 1
    assert server.core.plan_step(0.0) == ()


def test_heartbeat_reports_steps_rows_pages_and_wait() -> None:
    network = ServerNetwork()
    (client,) = sessions(network, [3])
    (server,) = network.servers.values()
    client.start(2)
    network.deliver_all()
    network.tick(2.0)
    heartbeat = server.core.heartbeat()
    assert (heartbeat.steps, heartbeat.rows, heartbeat.sessions, heartbeat.oldest_ready_ms) == (
        0,
        0,
        1,
        2000.0,
    )
    assert (heartbeat.free_pages, heartbeat.total_pages) == (1999, 2000)
    server.begin_step(network.now)
    server.end_step(network.now + 0.25)
    heartbeat = server.core.heartbeat()
    assert (heartbeat.steps, heartbeat.rows, heartbeat.step_ms, heartbeat.oldest_ready_ms) == (
        1,
        3,
        250.0,
        0.0,
    )
    assert (heartbeat.stepping_ms, heartbeat.step_p99_ms) == (0.0, 250.0)


def test_heartbeat_reports_duration_of_running_step() -> None:
    network = ServerNetwork()
    (client,) = sessions(network, [3])
    (server,) = network.servers.values()
    client.start(2)
    network.deliver_all()
    server.begin_step(network.now)
    network.tick(7.0)
    heartbeat = server.core.heartbeat()
    assert (heartbeat.steps, heartbeat.stepping_ms, heartbeat.oldest_ready_ms) == (
        0,
        7000.0,
        7000.0,
    )


def test_windows_are_not_sent_for_every_token() -> None:
    network = ServerNetwork()
    (client,) = sessions(network, [3], hops=2, row_window=64)
    client.start(300)
    assert len(client.finish()) == 300
    back = [send for name, send in network.record if name == "s1/1/b" and send.to.peer == "s0/1/b"]
    windows = [send for send in back if type(send.item).__name__ == "Window"]
    assert 300 // 64 <= len(windows) <= 2 + 300 // 32
    assert all(send.lane is Lane.LIVE for send in windows)


def test_busy_time_includes_stalls_between_steps() -> None:
    """The process runs 5 of every 100 ms, and its steps fit into these."""
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
    heartbeat = server.core.heartbeat()
    assert 5.0 < heartbeat.busy_ms / heartbeat.steps < 20.0
    assert heartbeat.step_ms == pytest.approx(1.0), "deadlines use the steps without stalls"


@pytest.mark.parametrize(("windows", "decoded"), [((), 4 + 6), ((4, None), 4 + 5)])
def test_heartbeat_counts_what_steps_read_in_a_block(
    windows: tuple[int | None, ...], decoded: int
) -> None:
    """A step of two prompts, of three and of five positions, and a decode step of both sessions."""
    network = ServerNetwork()
    clients = sessions(network, [3, 5], windows=windows)
    (server,) = network.servers.values()
    start_all(clients, 50)
    shape = server.model.shape
    for steps, positions in ((1, 3 + 5), (2, 3 + 5 + decoded)):
        network.deliver_all()
        server.begin_step(0.0)
        server.end_step(0.01)
        heartbeat = server.core.heartbeat()
        assert heartbeat.steps == steps
        assert heartbeat.read_bytes == steps * shape.block_bytes + positions * shape.kv_bytes


def test_long_and_failed_steps_are_not_counted_as_stalls() -> None:
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
    for now in (0.77, 1.04):  # each session alone
        (task,) = core.plan_step(now)
        core.sample_stalls(now + 0.2, SAMPLE_SECONDS)
        core.finish_step(server.model.step((task,)), now + 0.25)
        core.sample_stalls(now + 0.26, SAMPLE_SECONDS)
    assert core.heartbeat().busy_ms == pytest.approx(500.0)


def test_small_loop_delays_are_not_counted_as_stalls() -> None:
    stalls = StallEstimator()
    for number in range(100):
        stalls.sample(number * (SAMPLE_SECONDS + 0.9 * MIN_STALL), 0.0, SAMPLE_SECONDS)
    assert stalls.slowdown == 1.0


def step_time_beside_stalls(copies: bool) -> float:
    """Return the reported time of a 10 ms step while the process stalls for 70 of every 100 ms between such steps.

    `copies`: the stall hits a copy step, otherwise it hits no step.
    """
    stalls, now, reported = StallEstimator(), 0.0, 0.0
    for _ in range(60):
        stalls.sample(now, 0.0, SAMPLE_SECONDS)
        reported = stalls.scaled(0.01)
        now += SAMPLE_SECONDS
        stalls.sample(now, 0.0, SAMPLE_SECONDS)
        now += SAMPLE_SECONDS + 0.05
        if copies:  # it has ended when the loop takes a sample
            stalls.discard_step()
        stalls.sample(now, 0.0, SAMPLE_SECONDS)
    return reported


def test_stall_during_copy_step_lengthens_reported_steps() -> None:
    alone = step_time_beside_stalls(copies=False)
    assert alone > 0.02 and step_time_beside_stalls(copies=True) == pytest.approx(alone)


class Throttled:
    """The clock of a process that stalls for a part of about every 0.1 s."""

    def __init__(self, alive: float, seconds: float) -> None:
        rng, at = random.Random(1), 0.0
        self._stops: list[tuple[float, float]] = []
        while at < seconds + 10:
            stop = at + 0.1 * alive * rng.expovariate(1.0)
            at = stop + 0.1 * (1 - alive) * rng.uniform(0.5, 1.5)
            self._stops.append((stop, at))

    def done(self, at: float, work: float = 0.0) -> float:
        """Return the end of `work` seconds of work that begins at `at`, or when the stall ends."""
        for stop, end in self._stops[max(0, bisect(self._stops, (at, at)) - 1) :]:
            at = end if stop <= at < end else at
            if at + work < stop:
                break
            if at < stop:
                work, at = work - (stop - at), end
        return at + work


def slowdown_factor(alive: float, work: float, pause: float, *, on_loop: bool = False) -> float:
    """Return the factor by which reported steps are longer than on a process that never stalls.

    `on_loop`: no sample is taken while a step runs.
    """
    seconds, process, stalls = 60.0, Throttled(alive, 60.0), StallEstimator()
    began = ready = sum_reported = 0.0
    ends, pulse, steps = process.done(0.0, work), SAMPLE_SECONDS, 0
    while ready < seconds:
        if pulse < (began if on_loop else ends):
            stalls.sample(pulse, max(0.0, pulse - began), SAMPLE_SECONDS)
            pulse = process.done(pulse + SAMPLE_SECONDS)
        else:
            worked = work if on_loop else None
            sum_reported, steps = sum_reported + stalls.scaled(ends - began, worked), steps + 1
            pulse = max(pulse, ends) if on_loop else pulse
            ready = ends + pause
            began = process.done(ready)
            ends = process.done(began, work)
    return sum_reported / steps / work


@pytest.mark.parametrize("alive", [0.05, 0.3, 0.5, 0.8])
@pytest.mark.parametrize(
    ("work", "pause"), [(0.001, 0.02), (0.01, 0.01), (0.02, 0.001), (0.05, 0.05)]
)
def test_reported_step_time_grows_with_stalled_share(
    alive: float, work: float, pause: float
) -> None:
    """This holds for any number of steps, with stalls mostly in steps or mostly between. No stall counts twice."""
    assert 0.5 < alive * slowdown_factor(alive, work, pause) < 1.7


@pytest.mark.parametrize("alive", [0.05, 0.3, 0.5, 0.8])
@pytest.mark.parametrize(("work", "pause"), [(0.001, 0.0), (0.001, 0.02), (0.005, 0.001)])
def test_steps_on_the_loop_hide_no_stalled_share(alive: float, work: float, pause: float) -> None:
    factor = slowdown_factor(alive, work, pause, on_loop=True)
    assert 0.5 < alive * factor < 1.7


def test_single_long_outage_barely_raises_slowdown() -> None:
    stalls, now = StallEstimator(), 0.0
    for _ in range(100):
        now += SAMPLE_SECONDS
        stalls.sample(now, 0.0, SAMPLE_SECONDS)
    stalls.sample(now + 30.0, 0.0, SAMPLE_SECONDS)
    assert 1.0 < stalls.slowdown < 1.5


def test_old_stall_no_longer_raises_slowdown() -> None:
    stalls = StallEstimator()
    stalls.sample(0.0, 0.0, SAMPLE_SECONDS)
    stalls.sample(0.1, 0.0, SAMPLE_SECONDS)
    assert stalls.slowdown > 5.0
    for number in range(1, 400):
        stalls.sample(0.1 + number * SAMPLE_SECONDS, 0.0, SAMPLE_SECONDS)
    assert stalls.slowdown < 1.01
