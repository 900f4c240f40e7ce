"""The engine runs short steps on the event loop, all other work on its thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence

from typing_extensions import override

from modelswarm_serving.model.base import BatchItem, KvRead, ModelShape, Result, Task
from modelswarm_serving.model.hash_model import HashModel
from modelswarm_serving.runtime.engine import Engine, StepDone

SECONDS_PER_ROW = 0.01
LONG, NEVER = 600.0, 1e-9


class SlowRows(HashModel):
    """Each row takes some time; a step of 13 rows fails."""

    def __init__(self) -> None:
        super().__init__(
            ModelShape(
                0,
                1,
                1,
                row_bytes=8,
                page_size=16,
                total_pages=8,
                kv_bytes=8,
                max_length=128,
                vocab_size=9,
            )
        )
        self.threads: list[str] = []

    @override
    def step(self, batch: Sequence[Task]) -> list[Result]:
        rows = sum(task.count for task in batch)
        self.threads.append(threading.current_thread().name)
        if rows == 13:
            raise RuntimeError("thirteen")
        time.sleep(rows * SECONDS_PER_ROW)
        return [Result() for _ in batch]


def rows(count: int) -> list[Task]:
    return [BatchItem([0], 0, count, (0, 1), [1] * count, None, count, None)]


async def run(short_step_seconds: float, works: Sequence[Sequence[Task]]) -> list[str]:
    """Run the works in turn; return the thread of each."""
    return [thread for thread, _ in await outcomes(short_step_seconds, works)]


async def outcomes(
    short_step_seconds: float, works: Sequence[Sequence[Task]]
) -> list[tuple[str, StepDone]]:
    """Run the works in turn; return the thread and the end of each."""
    model = SlowRows()
    ends: list[StepDone] = []
    done: asyncio.Queue[StepDone] = asyncio.Queue()
    engine = Engine(model, done.put_nowait, short_step_seconds=short_step_seconds)
    for work in works:
        engine.submit(work)
        ends.append(await asyncio.wait_for(done.get(), 60))
    main = threading.main_thread().name
    threads = ["loop" if name == main else name for name in model.threads]
    return list(zip(threads, ends, strict=True))


async def test_short_steps_after_the_first_run_on_the_loop() -> None:
    assert await run(LONG, [rows(1), rows(1), rows(3)]) == ["engine", "loop", "loop"]


async def test_end_of_a_short_step_is_reported_before_submit_returns() -> None:
    done: asyncio.Queue[StepDone] = asyncio.Queue()
    engine = Engine(SlowRows(), done.put_nowait, short_step_seconds=LONG)
    engine.submit(rows(1))
    await asyncio.wait_for(done.get(), 60)
    engine.submit(rows(1))
    assert done.get_nowait().worked is not None


async def test_no_step_runs_on_the_loop_of_a_device() -> None:
    assert await run(0.0, [rows(1), rows(1)]) == ["engine", "engine"]


async def test_step_after_a_long_one_runs_on_the_thread() -> None:
    assert await run(NEVER, [rows(1), rows(1)]) == ["engine", "engine"]


async def test_step_of_many_more_rows_is_expected_to_be_long() -> None:
    many = rows(1 + int(LONG / SECONDS_PER_ROW))
    model = SlowRows()
    done: asyncio.Queue[StepDone] = asyncio.Queue()
    engine = Engine(model, done.put_nowait, short_step_seconds=LONG)
    engine.submit(rows(1))
    await asyncio.wait_for(done.get(), 60)
    assert engine.is_short(rows(1))
    assert not engine.is_short(many)


async def test_steps_of_kv_run_on_the_thread() -> None:
    kv: list[Task] = [KvRead([0], 0, 1, (0, 1))]
    assert await run(LONG, [rows(1), kv, rows(1)]) == ["engine", "engine", "loop"]


async def test_failed_step_on_the_loop_is_reported_as_any_other() -> None:
    found = await outcomes(LONG, [rows(1), rows(13), rows(1)])
    assert [thread for thread, _ in found] == ["engine", "loop", "loop"]
    assert [end.error for _, end in found] == [None, "RuntimeError: thirteen", None]


async def test_socket_is_read_between_two_steps_on_the_loop() -> None:
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    order: list[str] = []
    ended = asyncio.Event()

    def read() -> None:
        near.recv(1)
        order.append("read")

    def plan() -> None:
        order.append("plan")
        if order.count("plan") == 3:
            ended.set()
            return
        engine.submit(rows(1))
        far.send(b"x")  # at the latest at the end of a step on the loop

    def done(_: StepDone) -> None:
        order.append("done")
        loop.call_at(loop.time(), plan)  # as the node does

    engine = Engine(SlowRows(), done, short_step_seconds=LONG)
    with near, far:
        near.setblocking(False)
        loop.add_reader(near, read)
        plan()
        await asyncio.wait_for(ended.wait(), 60)
        loop.remove_reader(near)
    on_the_loop = order[order.index("plan", 1) :]
    assert on_the_loop == ["plan", "done", "read", "plan"]
