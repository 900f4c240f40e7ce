"""One server as the gateway sees it: load, round trips, block times, pages, and implausible heartbeats."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.core.fleets import IDLE, hello

from modelswarm.protocol.messages import Heartbeat
from modelswarm_gateway.core.servers.server import (
    FULL_KV_WAIT_MS,
    IDLE_DECAY_SECONDS,
    MAX_PLAUSIBLE_MS,
    MAX_RUNNING,
    MAX_SPEEDUP,
    MIN_KV_WAIT_MS,
    ROWS_PER_SESSION,
    RTT_RISE,
    Floats,
    Server,
    kv_wait_ms,
    pages_for,
    sanitized,
)

HALF = Server(hello("half", 1, 3))
TIMES = ("step_ms", "step_p99_ms", "oldest_ready_ms", "stepping_ms")


def fresh() -> Server:
    """Return a server of two blocks without a heartbeat."""
    return replace(HALF)


def column(value: float) -> Floats:
    return np.array([value])


# ---- heartbeats


@pytest.mark.parametrize("field", TIMES)
@pytest.mark.parametrize(
    ("value", "taken"),
    [
        (0.0, 0.0),
        (0.25, 0.25),
        (MAX_PLAUSIBLE_MS, MAX_PLAUSIBLE_MS),
        (2 * MAX_PLAUSIBLE_MS, MAX_PLAUSIBLE_MS),
        (-0.25, MAX_PLAUSIBLE_MS),
        (math.nan, MAX_PLAUSIBLE_MS),
        (math.inf, MAX_PLAUSIBLE_MS),
    ],
)
def test_implausible_time_becomes_the_worst_accepted_one(
    field: str, value: float, taken: float
) -> None:
    """The other fields stay, also beside another implausible one."""
    sent = replace(IDLE, **{field: value})  # type: ignore[arg-type]
    assert sanitized(sent) == replace(IDLE, **{field: taken})  # type: ignore[arg-type]
    both = replace(sent, running=MAX_RUNNING + 1)
    assert sanitized(both) == replace(
        IDLE,
        running=MAX_RUNNING,
        **{field: taken},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("value", "taken"),
    [(0.0, 0.0), (0.25, 0.25), (1e12, 1e12), (-0.25, 0.0), (math.inf, 0.0), (math.nan, 0.0)],
)
@pytest.mark.parametrize("field", ["busy_ms", "read_bytes"])
def test_implausible_sums_count_as_none(field: str, value: float, taken: float) -> None:
    fair: dict[str, Any] = {field: taken}
    sent = replace(IDLE, **{**fair, field: value})
    assert sanitized(sent) == replace(IDLE, **fair)
    both = replace(sent, running=MAX_RUNNING + 1)
    assert sanitized(both) == replace(IDLE, running=MAX_RUNNING, **fair)


def test_plausible_heartbeat_stays_the_same_object() -> None:
    sent = replace(IDLE, running=MAX_RUNNING)
    assert sanitized(sent) is sent


def test_heartbeat_replaces_what_was_placed_since_the_last_one() -> None:
    server = fresh()
    server.reserve(5, ROWS_PER_SESSION)
    assert (server.load, server.reserved_pages) == (2.0, 2)
    server.reserve(4, 0)
    assert (server.load, server.reserved_pages) == (3.0, 3)
    assert server.free_pages == server.hello.total_pages - 3
    server.on_heartbeat(Heartbeat(running=4, free_pages=100), 1.0)
    assert (server.load, server.reserved_pages, server.free_pages) == (4.0, 0, 100.0)
    server.reserve(4, 0)
    assert (server.load, server.free_pages) == (5.0, 99.0)


def test_load_is_not_negative() -> None:
    server = fresh()
    server.placed_load = -3.0
    assert (server.load, server.slowdown) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("second", "stepped_at"),
    [
        (Heartbeat(steps=5), 1.0),
        (Heartbeat(steps=6), 2.0),
        (Heartbeat(steps=5, running=1), 2.0),
    ],
)
def test_server_steps_while_sessions_run_or_its_steps_grow(
    second: Heartbeat, stepped_at: float
) -> None:
    server = fresh()
    assert server.stepped_at == -math.inf
    server.on_heartbeat(Heartbeat(steps=5), 1.0)
    server.on_heartbeat(second, 2.0)
    assert server.stepped_at == stepped_at


@pytest.mark.parametrize(("oldest", "wait"), [(8.0, 0.0), (5.0, 0.0), (8.5, 0.5), (108.0, 100.0)])
def test_oldest_row_waits_beyond_the_step(oldest: float, wait: float) -> None:
    server = fresh()
    assert server.queue_ms == 0.0
    server.on_heartbeat(replace(IDLE, step_ms=8.0, oldest_ready_ms=oldest), 1.0)
    assert server.queue_ms == wait


# ---- times


def test_short_round_trips_count_and_long_ones_hardly() -> None:
    server = fresh()
    found = []
    for seconds in (0.020, 0.010, 0.010, 0.110):
        server.record_round_trip(seconds)
        found.append(server.rtt_ms)
    assert found == pytest.approx([20.0, 10.0, 10.0, 10.0 + RTT_RISE * 100.0])


def test_block_time_is_measured_once_there_are_steps() -> None:
    server = fresh()
    found = [server.measured_block_ms]
    for steps in (0, 1):
        assert server.block_ms(3.0, 1.0) == 3.0
        server.on_heartbeat(replace(IDLE, steps=steps, step_ms=8.0), 1.0 + steps)
        found.append(server.measured_block_ms)
    assert found == [None, None, 4.0], "of two blocks"
    assert server.block_ms(3.0, 2.0) == server.block_ms(3.0, 1.0) == 4.0


def test_block_time_of_an_idle_server_fades_into_the_median() -> None:
    server = fresh()
    server.on_heartbeat(replace(IDLE, steps=1, step_ms=8.0), 2.0)
    later = server.block_ms(3.0, 2.0 + IDLE_DECAY_SECONDS)
    assert later == pytest.approx(3.0 + math.exp(-1.0))


def test_block_time_is_not_much_below_the_median() -> None:
    server = fresh()
    server.on_heartbeat(replace(IDLE, steps=1, step_ms=1e-6), 2.0)
    assert server.block_ms(3.0, 2.0) == pytest.approx(3.0 / MAX_SPEEDUP)


def test_every_two_sessions_add_an_idle_step_to_the_block_time() -> None:
    server = fresh()
    server.on_heartbeat(replace(IDLE, steps=1, step_ms=8.0, running=3), 2.0)
    assert server.slowdown == 2.5
    assert server.block_ms(4.0, 2.0) == 10.0


# ---- pages


@pytest.mark.parametrize(
    ("positions", "page", "pages"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (5, 0, 0)]
)
def test_positions_fill_whole_pages(positions: int, page: int, pages: int) -> None:
    assert pages_for(positions, page) == pages


@pytest.mark.parametrize(
    ("positions", "free", "for_recovery", "short"),
    [
        (40, 20.0, False, 0),  # 10 of 20 pages, and 10 that are reserved
        (41, 20.0, False, 1),
        (40, 19.0, False, 1),
        (0, 0.0, False, 0),
        (1, 10.0, False, 1),
        (40, 10.0, True, 0),
        (41, 10.0, True, 1),
        (48, 10.0, True, 2),
    ],
)
def test_wait_grows_with_the_pages_that_are_missing(
    positions: int, free: float, for_recovery: bool, short: int
) -> None:
    """The server has 100 pages of four positions; a tenth is for recovery."""
    found = kv_wait_ms(positions, for_recovery, column(free), column(100.0), column(4.0))
    expected = MIN_KV_WAIT_MS + FULL_KV_WAIT_MS * short / 100.0 if short else 0.0
    assert found.tolist() == [pytest.approx(expected)]
    server = Server(replace(hello("s"), total_pages=100, page_size=4))
    server.on_heartbeat(Heartbeat(free_pages=int(free)), 1.0)
    assert server.predicted_wait_ms(positions, for_recovery) == pytest.approx(expected)


@pytest.mark.parametrize(("total", "page"), [(0.0, 4.0), (100.0, 0.0)])
def test_server_that_declares_no_pages_announces_no_wait(total: float, page: float) -> None:
    assert kv_wait_ms(64, True, column(0.0), column(total), column(page)).tolist() == [0.0]


def test_only_the_servers_that_lack_pages_have_a_wait() -> None:
    free, total, page = np.array([50.0, 0.0, 50.0]), np.full(3, 100.0), np.full(3, 4.0)
    wait = kv_wait_ms(4, False, free, total, page)
    assert wait[0] == wait[2] == 0.0 < wait[1]
