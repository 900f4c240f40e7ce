"""Resumed streams of a running gateway: a resume proves the received tokens; a replaced stream ends with an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import httpx
import pytest
from support.processes.http_requests import FOREVER, READ_ON, lines, tokens_of
from support.processes.swarm import ENDLESS, MODEL, Endpoints, two_spans

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.generation.resumption import parse_event_id


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    with two_spans(tmp_path_factory.mktemp("resume"), context=ENDLESS) as swarm:
        yield swarm.gateway()


def resume(endpoints: Endpoints, body: dict[str, Any], event_id: str) -> tuple[int, str]:
    """Return status and error code of a refused resume."""
    answer = httpx.post(
        f"{endpoints.url}/v1/completions",
        json=body | {"stream": True},
        headers={"Last-Event-ID": event_id},
        timeout=60,
    )
    return answer.status_code, answer.json()["error"]["code"]


def read_to_event(stream: Iterator[str]) -> str:
    """Read a stream up to its next event with a token; return the id."""
    event_id = ""
    for line in stream:
        if line.startswith("id: "):
            event_id = line[4:]
        if tokens_of(line):
            return event_id
    raise AssertionError("the stream ended")


def test_resume_without_knowledge_of_the_log_changes_nothing(gateway: Endpoints) -> None:
    body = FOREVER | {"session_id": "alice"}
    with closing(lines(gateway, body)) as stream:
        position, mark = parse_event_id(read_to_event(stream))
        first_token = {"prompt": [103]}  # "g": easy to guess
        guessed = f"{position}-{(int(mark, 16) + 1) % 2**32:08x}"
        assert resume(gateway, body | first_token, "0") == (400, "invalid_request")
        assert resume(gateway, body | first_token, str(position)) == (400, "invalid_request")
        assert resume(gateway, body, guessed) == (410, "session_lost")
        assert resume(gateway, body, f"{ENDLESS}-{mark}") == (410, "session_lost")
        known = f"{position}-{mark}"
        assert resume(gateway, body | first_token, known) == (400, "invalid_request")
        got = [
            token
            for line, _ in zip(stream, range(4 * READ_ON), strict=False)
            for token in tokens_of(line)
        ]
    assert len(got) >= READ_ON, "the stream of the owner went on"


def test_replaced_stream_ends_with_an_error(gateway: Endpoints) -> None:
    body = FOREVER | {"session_id": "two-readers"}
    with closing(lines(gateway, body)) as first, httpx.Client(timeout=60) as client:
        event_id = read_to_event(first)
        with client.stream(
            "POST",
            f"{gateway.url}/v1/completions",
            json=body | {"stream": True},
            headers={"Last-Event-ID": event_id},
        ) as second:
            assert second.status_code == 200
            received = second.iter_lines()
            assert parse_event_id(read_to_event(received))[0] > parse_event_id(event_id)[0]
            rest = list(first)
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "stream_replaced"


def test_replaced_grpc_stream_ends_with_a_status(gateway: Endpoints) -> None:
    request = api_pb2.GenerateRequest(
        model=MODEL, prompt="go", max_tokens=ENDLESS - 2, ignore_eos=True, session_id="calls"
    )
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub: Any = api_pb2_grpc.InferenceStub(channel)
        first = stub.GenerateStream(request, timeout=60)
        part = next(first)
        request.resume_after = part.position + len(part.token_ids) - 1
        with pytest.raises(grpc.RpcError) as refused:
            stub.Generate(request, timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, "the mark is missing"
        request.resume_mark = part.mark
        second = stub.GenerateStream(request, timeout=60)
        assert next(second).position == request.resume_after + 1
        with pytest.raises(grpc.RpcError) as replaced:
            list(first)
        second.cancel()
    ended: Any = replaced.value
    assert ended.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert dict(ended.trailing_metadata())["error-code"] == "stream_replaced"
