"""Turns of passes at the engine, and their memory, without a server."""

from __future__ import annotations

import asyncio

import pytest

from modelswarm_serving.runtime.passes.memory import PassMemory
from modelswarm_serving.runtime.passes.schedule import PassSchedule, ScheduledPass


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


def run_part(schedule: PassSchedule, now: float) -> float:
    running = schedule.begin_part(now)
    schedule.finish_part(running.result() if running.advance() else None, now + 1)
    return now + 1


def test_steps_get_four_times_the_time_of_a_part() -> None:
    schedule, ended = PassSchedule(), list[bytes | str | None]()
    schedule.enqueue_pass(scheduled(3, ended))
    now = run_part(schedule, 0)
    for later in (1.0, 2.0, 4.9):
        assert not schedule.is_due(later), "rows that wait go first"
    assert schedule.has_waiting, "an idle engine need not wait"
    assert schedule.is_due(now + 4)
    now = run_part(schedule, now + 4)
    assert not ended
    run_part(schedule, now + 4)
    assert ended == [b"done"]
    assert (schedule.has_waiting, schedule.is_due(99)) == (False, False)


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
    schedule.begin_part(0)
    schedule.abandon(one)
    assert not ended, "the engine still holds its memory"
    schedule.finish_part(None, 1)
    assert ended == [None]
    schedule.abandon(other)
    assert ended == [None, None] and not schedule.has_waiting


def test_failure_of_a_part_ends_its_pass() -> None:
    schedule, ended = PassSchedule(), list[bytes | str | None]()
    schedule.enqueue_pass(scheduled(9, ended))
    schedule.begin_part(0)
    schedule.finish_part("RuntimeError: broken", 1)
    assert ended == ["RuntimeError: broken"] and not schedule.has_waiting


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
