"""An answer of another gateway is passed on in whole events, and another way is looked for when that is gone."""

from __future__ import annotations

import json

import pytest

from modelswarm_gateway.api.failover import Course
from modelswarm_gateway.api.forwarding import Gone
from modelswarm_gateway.api.http.openai_responses import ChatShape, Head, error_event, waiting
from modelswarm_gateway.api.http.sse_reader import Events, id_of, refusal
from modelswarm_gateway.errors import ApiError, Code

SHAPE = ChatShape(Head("m", 1, (5, 6), usage_in_stream=True))
FIRST, SECOND = SHAPE.event("a", (7,), "2"), SHAPE.event("\n\nid: 9\n", (8,), "3-0a")
CALM = b"".join((waiting(""), SHAPE.opening(), FIRST, waiting(""), SECOND))
ALL = CALM + SHAPE.closing("stop", 2)


@pytest.mark.parametrize("size", [1, 7, 64, len(ALL)])
def test_a_stream_is_passed_on_as_it_is_however_it_comes(size: int) -> None:
    events = Events()
    parts = [events.take(ALL[at : at + size]) for at in range(0, len(ALL), size)]
    assert b"".join(parts) == ALL
    assert (events.last, events.over, events.error) == ("3-0a", True, None)


def test_whatever_was_passed_on_can_be_gone_on_behind_its_last_id() -> None:
    calm = [line for line in ALL.split(b"\n") if not line.startswith(b":")]
    for length in range(1, len(ALL)):
        events = Events()
        passed = events.take(ALL[:length])
        rest = {None: SHAPE.opening() + FIRST + SECOND, "2": SECOND, "3-0a": b""}[events.last]
        whole = passed + rest + SHAPE.closing("stop", 2)
        assert events.over is False
        assert [line for line in whole.split(b"\n") if not line.startswith(b":")] == calm


def test_an_error_of_the_other_gateway_is_told_apart() -> None:
    error = ApiError(Code.STOPPING, "it ends")
    events = Events()
    assert events.take(CALM + error_event(error.envelope())) == CALM
    assert events.error is not None
    assert (events.error.code, str(events.error), events.over) == (error.code, "it ends", False)
    assert refusal(b"<html>").code is Code.INTERNAL
    assert refusal(json.dumps({"error": {"code": "new", "message": ""}}).encode()).code
    assert id_of(SECOND) == "3-0a"


async def test_a_way_on_is_looked_for_a_while_and_only_once_something_broke() -> None:
    now = 0.0
    course = Course(lambda: now)
    busy = ApiError(Code.SESSION_BUSY, "busy")
    with pytest.raises(ApiError, match="busy"):
        await course.again(busy)
    await course.again(Gone())
    await course.again(busy)
    with pytest.raises(ApiError, match="lost"):
        await course.again(ApiError(Code.SESSION_LOST, "lost"))
    course.told()
    with pytest.raises(ApiError, match="busy"):
        await course.again(busy)
    await course.again(Gone())
    now = 1000.0
    with pytest.raises(ApiError, match="go on with Last-Event-ID"):
        await course.again(busy)
