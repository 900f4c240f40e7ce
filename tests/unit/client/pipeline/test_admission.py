"""Admission of a pipeline: places in order, fewer after refusals, more after answers."""

from __future__ import annotations

import asyncio

from modelswarm.client.pipeline.admission import Admission


async def test_places_are_bounded_and_given_in_order() -> None:
    admission = Admission(2)
    entered: list[int] = []

    async def enter(number: int) -> None:
        await admission.enter()
        entered.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert entered == [0, 1]
    for expected in ([0, 1, 2], [0, 1, 2, 3]):
        admission.leave()
        await asyncio.sleep(0)
        assert entered == expected
    await asyncio.gather(*tasks)
    assert admission.running == 2


async def test_cancelled_caller_gives_its_place_back() -> None:
    admission = Admission(1)
    await admission.enter()
    waiting = [asyncio.create_task(admission.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    admission.leave()
    waiting[1].cancel()  # its place was given, and it has not run since
    await asyncio.gather(*waiting, return_exceptions=True)

    assert [task.cancelled() for task in waiting] == [True, True, False]
    assert admission.running == 1


async def test_place_is_free_while_a_caller_is_cancelled() -> None:
    """The caller is cancelled as any other: its run raises the error that has ended it."""
    admission = Admission(1)
    await admission.enter()
    waiting = [asyncio.create_task(admission.enter()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    admission.leave()  # before the cancelled one has run
    await asyncio.gather(*waiting, return_exceptions=True)

    assert [task.cancelled() for task in waiting] == [True, False]
    assert admission.running == 1


async def test_refusals_halve_the_places_and_answers_add_one() -> None:
    admission = Admission(8)
    for _ in range(8):
        await admission.enter()
    admission.lower_limit()
    assert admission.limit == 4
    for _ in range(7):
        admission.leave()
    admission.lower_limit()
    assert admission.limit == 1
    for _ in range(100):
        admission.raise_limit()
    assert admission.limit == 8
