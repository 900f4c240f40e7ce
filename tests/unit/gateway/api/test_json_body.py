"""Bodies that are read at a time: large ones share a budget, small ones are always taken."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from starlette.requests import Request
from starlette.types import Message

from modelswarm_gateway.api.http.json_body import (
    MAX_OBJECTS,
    SMALL_BODY_BYTES,
    BodyBudget,
    parse_json,
    read_json,
)
from modelswarm_gateway.errors import ApiError, Code

MOST = 1 << 20


def make_request(first: bytes, rest: asyncio.Future[bytes] | None = None) -> Request:
    """Return a request whose body is `first`, and `rest` once it is there."""
    parts = iter((first, rest))

    async def receive() -> Message:
        part = next(parts)
        body = part if isinstance(part, bytes) else await part if part is not None else b""
        return {
            "type": "http.request",
            "body": body,
            "more_body": body is first and rest is not None,
        }

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_large_bodies_that_arrive_share_a_budget() -> None:
    budget = BodyBudget(MOST)
    rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    slow = make_request(b'"' + b"a" * (MOST + SMALL_BODY_BYTES - 2), rest)
    reading = asyncio.create_task(read_json(slow, budget))
    await asyncio.sleep(0)
    large = b'"' + b"b" * SMALL_BODY_BYTES + b'"'
    with pytest.raises(ApiError) as refused:
        await read_json(make_request(large), budget)
    assert (refused.value.code, refused.value.retry_after) == (Code.NO_CAPACITY, 1.0)
    assert await read_json(make_request(b'"small"'), budget) == "small"
    rest.set_result(b'"')
    assert len(str(await reading)) == MOST + SMALL_BODY_BYTES - 2
    assert await read_json(make_request(large), budget) == "b" * SMALL_BODY_BYTES


async def test_body_that_is_refused_gives_back_its_bytes() -> None:
    budget = BodyBudget(MOST)
    for _ in range(3):
        with pytest.raises(ApiError) as refused:
            await read_json(make_request(b"a" * MOST), budget)
        assert refused.value.code is Code.INVALID_REQUEST


def test_number_beyond_doubles_is_refused() -> None:
    """Python reads it as infinity, which an answer that repeats it could not write."""
    with pytest.raises(ApiError, match=r"the body has the number '?-1e400'?, beyond 1\.8e308"):
        parse_json(b'{"tools": [{"minimum": -1e400}]}')
    assert parse_json(b"[1.5, 1e308, -0.0]") == [1.5, 1e308, -0.0]


def test_body_of_many_objects_is_refused() -> None:
    """Each takes time of the event loop that its bytes do not tell: 580,000 messages took 4 s."""
    assert len(cast("list[object]", parse_json(many_objects(MAX_OBJECTS)))) == MAX_OBJECTS
    with pytest.raises(ApiError, match=r"the body has more than 65536 JSON objects") as refused:
        parse_json(many_objects(MAX_OBJECTS + 1))
    assert refused.value.code is Code.INVALID_REQUEST


def many_objects(count: int) -> bytes:
    return b"[" + b",".join([b"{}"] * count) + b"]"


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constant_that_is_no_json_is_refused_by_name(constant: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_json(f'{{"tools": [{{"default": {constant}}}]}}'.encode())
    assert refused.value.code is Code.INVALID_REQUEST
    assert str(refused.value) == f"the body is not valid JSON: {constant} is no number"
