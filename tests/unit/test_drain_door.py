"""`Swarm.Drain`, one call of it: what it tells while a server is left, and that it ends."""

from __future__ import annotations

import asyncio

import pytest
from protocol.scripted_servers import Script

from modelswarm.protocol import api_pb2
from modelswarm_gateway.doors.grpc_drain import drain
from modelswarm_gateway.drains import Drains
from modelswarm_gateway.errors import ApiError, Code

PROMPT = tuple(range(1, 21))


def two_tails() -> tuple[Script, Drains]:
    """A session runs over `a` and `b`; `c` holds the same blocks as `b` and answers nothing."""
    script = Script()
    script.serve("a", 0, 2)
    script.serve("b", 2, 4)
    script.ask("s", PROMPT)
    script.token("s")
    script.silent.add(script.serve("c", 2, 4))
    return script, Drains(script.core, lambda: script.now, script.run)


async def test_a_drain_that_somebody_else_takes_back_ends_and_says_so() -> None:
    _, drains = two_tails()
    states = drain(drains, api_pb2.DrainRequest(server="b"), lambda: True)
    first = await anext(states)
    assert first.own_sessions == 1 and not first.done
    [undone] = [s async for s in drain(drains, api_pb2.DrainRequest(server="b", undo=True), bool)]
    assert not undone.done
    with pytest.raises(ApiError) as told:
        async with asyncio.timeout(5):
            async for _ in states:
                pass
    assert told.value.code is Code.DRAIN_UNDONE and "b" in str(told.value)


async def test_an_unknown_server_is_answered_with_those_there_are() -> None:
    _, drains = two_tails()
    with pytest.raises(ApiError) as told:
        await anext(drain(drains, api_pb2.DrainRequest(server="z"), lambda: True))
    assert str(told.value) == "there is no server 'z'; known are: a, b, c"


async def test_a_drain_that_would_uncover_blocks_says_which() -> None:
    _, drains = two_tails()
    with pytest.raises(ApiError) as told:
        await anext(drain(drains, api_pb2.DrainRequest(server="a"), lambda: True))
    assert told.value.code is Code.BLOCKS_UNCOVERED and "blocks 0, 1" in str(told.value)
