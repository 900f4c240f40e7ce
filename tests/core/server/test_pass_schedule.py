"""Turns of passes at the engine, and their memory, without a server process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from support.core.scripted_gateway import (
    GATEWAY,
    ServerNetwork,
    make_clients,
    route,
    start_all,
)

from modelswarm_serving.model.base import KvRead, Task
from modelswarm_serving.model.passes.contract import RunningPass
from modelswarm_serving.runtime.engine import Engine, PartDone, StepDone
from modelswarm_serving.runtime.passes.memory import PassMemory
from modelswarm_serving.runtime.passes.schedule import PassSchedule, ScheduledPass

STEP: tuple[Task, ...] = (KvRead((0,), 0, 1, (0, 1)),)
PART_SECONDS = 0.001


class Parts:
    """A pass of some parts, of which each takes a second."""

    def __init__(self, count: int) -> None:
        self.left = count

    def advance(self) -> bool:
        self.left -= 1
        return not self.left

    def result(self) -> bytes:
        return b"done"


def scheduled(count: int, ended: list[bytes | str | None]) -> ScheduledPass:
    return ScheduledPass(Parts(count), ended.append)


def next_turn(
    schedule: PassSchedule, now: float, step: tuple[Task, ...] = ()
) -> RunningPass | Sequence[Task] | None:
    return schedule.next_turn(now, lambda: step)


def run_part(schedule: PassSchedule, now: float, step: tuple[Task, ...] = ()) -> float:
    running = next_turn(schedule, now, step)
    assert isinstance(running, Parts)
    schedule.finish_part(running.result() if running.advance() else None, now + 1)
    return now + 1


def test_steps_get_four_times_the_time_of_a_part() -> None:
    schedule, ended = PassSchedule(), list[bytes | str | None]()
    schedule.enqueue_pass(scheduled(3, ended))
    now = run_part(schedule, 0, STEP)
    for later in (1.0, 2.0, 4.9):
        assert next_turn(schedule, later, STEP) == STEP, "rows that wait go first"
    now = run_part(schedule, now + 4, STEP)
    now = run_part(schedule, now)  # an idle engine need not wait
    assert ended == [b"done"]
    assert next_turn(schedule, 99) is None


def test_late_loop_runs_a_step_between_two_parts() -> None:
    schedule = PassSchedule()
    schedule.enqueue_pass(scheduled(3, []))
    now = run_part(schedule, 0, STEP) + 100
    assert next_turn(schedule, now, STEP) == STEP
    run_part(schedule, now, STEP)


async def test_rows_wait_for_one_part_at_most() -> None:
    """Three sessions decode while two passes run. Between two turns the loop is late, at times by many parts."""
    network, schedule, draw = ServerNetwork(), PassSchedule(), random.Random(7)
    clients = make_clients(network, route(network, 1), [5, 3, 4])
    (server,) = network.servers.values()
    start_all(clients, 40)
    for _ in range(2):
        schedule.enqueue_pass(scheduled(500, []))
    done: asyncio.Queue[StepDone | PartDone] = asyncio.Queue()
    engine = Engine(server.model, done.put_nowait, done.put_nowait)

    def plan_step() -> tuple[Task, ...]:
        network.deliver_all()
        server.begin_step(network.now)
        return server.out

    turns = ""
    while any(len(client.tokens) < 40 for client in clients):
        network.now += draw.choice((0.0, 0.1, 20.0)) * PART_SECONDS
        turn = schedule.next_turn(network.now, plan_step)
        assert turn is not None
        engine.submit(turn)
        ended = await asyncio.wait_for(done.get(), 60)
        network.now += PART_SECONDS
        if isinstance(ended, PartDone):
            turns += "p"
            schedule.finish_part(ended.result, network.now)
            continue
        turns += "s"
        server.end_step(network.now, list(ended.results))
        network.deliver_all(to=GATEWAY)
        for client in clients:
            client.listen()
    assert "pp" not in turns, turns
    assert turns.count("p") > 9, "passes go on beside streams"


def test_passes_take_turns() -> None:
    schedule, first, second = PassSchedule(), list[bytes | str | None](), list[bytes | str | None]()
    schedule.enqueue_pass(scheduled(9, first))
    schedule.enqueue_pass(scheduled(2, second))
    for now in range(4):
        run_part(schedule, 10.0 * now)
    assert second == [b"done"] and not first


def test_abandoned_pass_ends_behind_its_part() -> None:
    schedule, ended = PassSchedule(), list[bytes | str | None]()
    one, other = scheduled(9, ended), scheduled(9, ended)
    schedule.enqueue_pass(one)
    schedule.enqueue_pass(other)
    next_turn(schedule, 0)
    schedule.abandon(one)
    assert not ended, "the engine still holds its memory"
    schedule.finish_part(None, 1)
    assert ended == [None]
    schedule.abandon(other)
    assert ended == [None, None] and next_turn(schedule, 9) is None


def test_failure_of_a_part_ends_its_pass() -> None:
    schedule, ended = PassSchedule(), list[bytes | str | None]()
    schedule.enqueue_pass(scheduled(9, ended))
    next_turn(schedule, 0)
    schedule.finish_part("RuntimeError: broken", 1)
    assert ended == ["RuntimeError: broken"] and next_turn(schedule, 9) is None


async def test_memory_is_given_in_the_order_of_requests() -> None:
    memory, order = PassMemory(10, 2), list[str]()

    async def take(name: str, size: int) -> None:
        await memory.reserve(size)
        order.append(name)

    await take("first", 8)
    waiting = [asyncio.create_task(take(*each)) for each in (("large", 10), ("small", 1))]
    await asyncio.sleep(0)
    assert (order, memory.is_crowded) == (["first"], True), "a small one overtook a large one"
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    await waiting[1]
    assert (order, memory.is_crowded) == (["first", "small"], False)
    memory.free(9)
    whole = await asyncio.wait_for(memory.reserve(10), 10)
    for size in (7, 9, 0, 0):
        whole.shrink(size)
    await asyncio.wait_for(memory.reserve(10), 10)


async def test_memory_of_a_cancelled_turn_is_free() -> None:
    memory = PassMemory(10, 2)
    await memory.reserve(10)
    waiting = asyncio.create_task(memory.reserve(5))
    await asyncio.sleep(0)
    memory.free(10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(memory.reserve(10), 10)
