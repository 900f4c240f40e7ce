"""A request that no free KV can serve is told so before its first token, and served once there is room."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from swarm.kills import prompt_of
from swarm.models import VOCAB
from swarm.running import MODEL, Ask, Running, Stream, local_settings, running_swarm, wait_until

LENGTH = 1024


@pytest.fixture(scope="module")
def swarm(toy_folder: Path) -> Iterator[Running]:
    """Room for one session of full length."""
    settings = local_settings("small", hash_model=True)
    with running_swarm(
        toy_folder, "small", spans=2, sessions=1, length=LENGTH, settings=settings
    ) as running:
        yield running


@pytest.fixture
def full(swarm: Running) -> Iterator[Stream]:
    """A stream that holds all the room there is; its client does not read on until the test is over."""
    swarm.wait_empty()
    stream = swarm.start(Ask(prompt_of(12, 1, VOCAB), LENGTH - 12))
    stream.wait_tokens(1)
    yield stream
    stream.cancel()


def post(swarm: Running, ask: Ask) -> tuple[int, dict[str, str], dict[str, object]]:
    body = {"model": MODEL, "prompt": ask.prompt, "max_tokens": ask.new, "stream": True}
    with closing(http.client.HTTPConnection(swarm.local.http, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        content = answer.read()
    return answer.status, headers, json.loads(content) if answer.status != 200 else {}


def test_http_gives_429_with_retry_after_and_serves_when_there_is_room(
    swarm: Running, full: Stream
) -> None:
    ask = Ask(prompt_of(30, 2, VOCAB), 100)
    status, headers, body = post(swarm, ask)
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    error = body["error"]
    assert isinstance(error, dict)
    assert error["code"] == "no_capacity"
    assert "no free KV for 129 positions" in error["message"]
    full.cancel()
    swarm.wait_empty()
    assert post(swarm, ask)[0] == 200


def test_grpc_gives_resource_exhausted_with_retry_after_and_serves_when_there_is_room(
    swarm: Running, full: Stream
) -> None:
    ask = Ask(prompt_of(30, 3, VOCAB), 100)
    with pytest.raises(grpc.RpcError) as refused:
        swarm.ask(ask)
    call: Any = refused.value  # also a grpc.Call
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert float(dict(call.trailing_metadata())["retry-after"]) > 0
    full.cancel()
    swarm.wait_empty()
    assert len(swarm.ask(ask).tokens) == 100


def test_a_parked_session_gives_way_to_a_request_that_needs_its_room(swarm: Running) -> None:
    swarm.wait_empty()
    swarm.ask(Ask(prompt_of(600, 4, VOCAB), 10, session="resting"))
    wait_until(lambda: len(swarm.pages_in_use()) == 2, 5.0, "a session that rests holds no pages")
    assert len(swarm.ask(Ask(prompt_of(600, 5, VOCAB), 50)).tokens) == 50
    swarm.wait_empty()
