"""A gateway is lost: its named sessions continue at one other gateway (R19: leases, R20: takeover)."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from support.eventually import eventually
from support.models.tokenizers import encode_bytes
from support.processes.http_requests import (
    FOREVER,
    IDS,
    READ_ON,
    expected_tokens,
    lines,
    tokens_of,
    whole,
)
from support.processes.swarm import CONTEXT, ENDLESS, Endpoints, HashSwarm, two_spans

from modelswarm.protocol.messages import Sampling
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.generation.resumption import LogMark, format_event_id, parse_event_id

LEASE = ("--lease", "2")
NAMED: dict[str, Any] = IDS | {"session_id": "talk", "temperature": 1.0, "top_k": 50}
SEEDED: dict[str, Any] = NAMED | {"seed": 7}
LONG = {"max_tokens": FOREVER["max_tokens"]}
SAMPLING = Sampling(temperature=1.0, top_k=50, seed=7)  # the sampling of SEEDED


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("loss"), *LEASE, context=ENDLESS) as running:
        yield running


def gateway(swarm: HashSwarm, name: str) -> Endpoints:
    return swarm.gateway(*LEASE, name=name)


def read(
    endpoints: Endpoints, body: dict[str, Any], after: str | None = None, events: int = 1 << 30
) -> tuple[str, list[int], str, list[str]]:
    """Return text, tokens, last id, and all lines of a stream or of its first events."""
    headers = {} if after is None else {"Last-Event-ID": after}
    text, tokens, last, received = "", [], "", []
    with (
        httpx.Client(timeout=60) as client,
        client.stream(
            "POST", f"{endpoints.url}/v1/completions", json=body | {"stream": True}, headers=headers
        ) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            received.append(line)
            if line.startswith("id: "):
                last = line[4:]
            if line.startswith("data: {"):
                tokens += tokens_of(line)
                text += "".join(c["text"] for c in json.loads(line[6:])["choices"])
                if len(tokens) >= events:
                    break
    return text, tokens, last, received


def broken_off(
    swarm: HashSwarm, endpoints: Endpoints, name: str, body: dict[str, Any]
) -> tuple[str, list[int], str]:
    """Return text, tokens and last id of a stream that broke when its gateway was killed."""
    text, tokens, last = "", [], ""
    with pytest.raises(httpx.HTTPError):
        for line in lines(endpoints, body):
            if line.startswith("id: "):
                last = line[4:]
            if line.startswith("data: {"):
                tokens += tokens_of(line)
                text += "".join(c["text"] for c in json.loads(line[6:])["choices"])
                if len(tokens) > 20:
                    swarm.kill(name)
    return text, tokens, last


@pytest.mark.parametrize(
    "body",
    [
        SEEDED | LONG,
        pytest.param(NAMED | LONG | {"session_id": "unseeded"}, marks=pytest.mark.full),
    ],
    ids=["seeded", "unseeded"],
)
def test_stream_of_killed_gateway_goes_on_at_another(
    swarm: HashSwarm, body: dict[str, Any]
) -> None:
    one, two = gateway(swarm, "one"), gateway(swarm, "two")
    text, tokens, last = broken_off(swarm, one, "one", body)
    other = body | {"stream": True, "prompt": "gone"}
    refused = httpx.post(
        f"{two.url}/v1/completions", json=other, headers={"Last-Event-ID": last}, timeout=60
    )
    assert refused.status_code == 400, "the length of the turn's prompt came with its log"
    more, rest, _, _ = read(two, body, after=last, events=READ_ON)
    both = [*tokens, *rest]
    assert len(tokens) > 20 and len(rest) >= READ_ON
    if "seed" in body:
        assert both == expected_tokens(len(both), sampling=SAMPLING)
    first = format_event_id(2, str(LogMark((*encode_bytes("go"), tokens[0]))))
    again, all_of_it, _, _ = read(two, body, after=first, events=len(both) - 1)
    shorter = min(len(again), len(text + more)) - 1
    assert all_of_it[: len(both) - 1] == both[1:], "the log has it all"
    assert again[:shorter] in [(text + more)[skip : skip + shorter] for skip in (0, 1)]
    swarm.kill("two")


def test_stopped_gateway_hands_its_streams_over(swarm: HashSwarm) -> None:
    """The stopped gateway has a lease of one hour."""
    one = swarm.gateway("--lease", "3600", "--drain-timeout", "0", name="one")
    two = gateway(swarm, "two")
    body = SEEDED | LONG | {"session_id": "handed"}
    tokens: list[int] = []
    last, is_stopped = "", False
    for line in lines(one, body):
        if line.startswith("id: "):
            last = line[4:]
        if line.startswith("data: {") and "choices" in line:
            tokens += tokens_of(line)
            if len(tokens) >= 20 and not is_stopped:  # an event may have several
                swarm.kill("one", signal.SIGTERM)
                is_stopped = True
    swarm.processes["one"].wait(60)
    rest = read(two, body, after=last, events=READ_ON)[1]
    both = [*tokens, *rest]
    assert len(tokens) >= 20 and len(rest) >= READ_ON
    assert both == expected_tokens(len(both), sampling=SAMPLING)
    swarm.kill("two")


@pytest.mark.full
def test_request_is_forwarded_to_the_gateway_of_its_session(
    swarm: HashSwarm,
) -> None:
    one, two = gateway(swarm, "first"), gateway(swarm, "second")
    short = NAMED | {"max_tokens": 20, "session_id": "mine", "seed": 3}
    made = whole(one, short)
    assert whole(two, short) == made
    assert read(two, short)[1] == made
    for endpoints, count in ((one, 3), (two, 0)):
        assert endpoints.metric("modelswarm_gateway_tokens_total", kind="generated") == 20 * count
    with grpc.insecure_channel(two.grpc) as channel:
        asked = api_pb2.GenerateRequest(
            model="hash", prompt="go", max_tokens=20, session_id="mine", ignore_eos=True
        )
        asked.sampling.temperature, asked.sampling.top_k, asked.sampling.seed = 1.0, 50, 3
        stub = api_pb2_grpc.InferenceStub(channel)
        assert list(stub.Generate(asked, timeout=60).token_ids) == made
        parts = list(stub.GenerateStream(asked, timeout=60))
        assert [token for part in parts for token in part.token_ids] == made
        place = len(parts) // 2
        asked.resume_after = parts[place].position + len(parts[place].token_ids) - 1
        asked.resume_mark = parts[place].mark
        rest = [token for part in parts[place + 1 :] for token in part.token_ids]
        assert list(stub.Generate(asked, timeout=60).token_ids) == rest
        asked.resume_mark = "00000000"
        with pytest.raises(grpc.RpcError) as lost:
            stub.Generate(asked, timeout=60)
        assert lost.value.code() is grpc.StatusCode.DATA_LOSS
    refused = httpx.post(
        f"{two.url}/v1/completions", json=short, headers={"x-modelswarm-forwarded": "1"}
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "session_elsewhere")
    swarm.kill("first")
    assert whole(two, short) == made, "waited for the lease, then adopted"
    swarm.kill("second")


@pytest.mark.full
def test_client_resumes_its_stream_where_it_stopped(swarm: HashSwarm) -> None:
    endpoints = gateway(swarm, "alone")
    body = SEEDED | {"session_id": "left"}
    _, tokens, last, _ = read(endpoints, body, events=30)
    assert int(last.partition("-")[0]) == 2 + len(tokens) - 1
    _, rest, _, _ = read(endpoints, body, after=last)
    assert [*tokens, *rest] == whole(endpoints, body | {"session_id": "calm"})
    assert len(tokens) + len(rest) == CONTEXT - 2
    swarm.kill("alone")


@pytest.mark.full
def test_request_that_cannot_be_resumed_is_refused(swarm: HashSwarm) -> None:
    endpoints = gateway(swarm, "strict")
    body = SEEDED | {"session_id": "new", "stream": True}

    def refused(after: str, **changes: Any) -> tuple[int, str]:
        answer = httpx.post(
            f"{endpoints.url}/v1/completions", json=body | changes, headers={"Last-Event-ID": after}
        )
        return answer.status_code, answer.json()["error"]["code"]

    made_up = "40-0123cdef"
    assert refused(made_up) == (410, "session_lost")
    assert refused("x") == (400, "invalid_request")
    assert refused("40") == (400, "invalid_request")
    assert refused(made_up, session_id=None) == (400, "invalid_request")
    assert refused(made_up, stream=False) == (400, "invalid_request")
    known = read(endpoints, body | {"max_tokens": 5})[2]
    assert refused(known, prompt="ax") == (400, "invalid_request")
    assert refused("0-0123cdef") == (400, "invalid_request")
    assert refused("100-0123cdef") == (410, "session_lost")
    last = read(endpoints, body | {"session_id": "other", "prompt": "ax", "max_tokens": 3})[2]
    assert refused(last) == (410, "session_lost"), "this is not the answer that was sent"
    assert refused(last, prompt="ax") == (410, "session_lost")
    swarm.kill("strict")


@pytest.mark.full
def test_thawed_gateway_gives_up_sessions_that_were_taken_over(
    swarm: HashSwarm,
) -> None:
    one, two = gateway(swarm, "frozen"), gateway(swarm, "awake")
    body = SEEDED | {"session_id": "held"}
    _, tokens, last, _ = read(one, body, events=30)
    swarm.kill("frozen", signal.SIGSTOP)
    _, rest, _, _ = read(two, body, after=last)
    assert [*tokens, *rest] == whole(two, body | {"session_id": "calm"})
    swarm.kill("frozen", signal.SIGCONT)
    eventually("it is ready again", lambda: swarm.is_ready(one))
    assert whole(one, body) == [*tokens, *rest], "passed on, or taken over and read anew"
    swarm.kill("frozen")
    swarm.kill("awake")


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM])
def test_forwarded_answers_go_on_here_when_their_gateway_is_gone(
    swarm: HashSwarm, number: signal.Signals
) -> None:
    """The readers know no ids. The connections of a frozen gateway stay open."""
    one, two = swarm.gateway(*LEASE, "--drain-timeout", "0", name="one"), gateway(swarm, "two")
    streamed, called = (SEEDED | {"session_id": f"{way}-{number.name}"} for way in ("http", "grpc"))
    for body in (streamed, called):
        whole(one, body | {"max_tokens": 3})
    both = threading.Barrier(2, lambda: swarm.kill("one", number))  # once both have tokens
    with ThreadPoolExecutor() as pool:
        streamed_lines = pool.submit(read_through, two, streamed, both)
        parts = pool.submit(call_through, two, called, both)
        calm = whole(two, SEEDED | {"session_id": "calm"})
        events, tokens = streamed_lines.result(60)
        assert events[-1] == "data: [DONE]"
        assert sum('"finish_reason":"length"' in line for line in events) == 1
        ids = [parse_event_id(line[4:])[0] for line in events if line.startswith("id: ")]
        assert ids == sorted(set(ids)) and ids[-1] == CONTEXT - 1
        assert tokens == calm
        assert parts.result(60) == list(enumerate(calm, 2))
    swarm.kill("one")
    swarm.kill("two")


def read_through(
    endpoints: Endpoints, body: dict[str, Any], midst: threading.Barrier
) -> tuple[list[str], list[int]]:
    """Return all lines and tokens of a stream."""
    received: list[str] = []
    tokens: list[int] = []
    for line in lines(endpoints, body):
        received.append(line)
        before = len(tokens)
        tokens += tokens_of(line)
        if before <= 20 < len(tokens):
            midst.wait(60)
    return received, tokens


def call_through(
    endpoints: Endpoints, body: dict[str, Any], midst: threading.Barrier
) -> list[tuple[int, int]]:
    """Return position and token of everything that a call returns."""
    asked = api_pb2.GenerateRequest(
        model="hash", prompt="go", max_tokens=CONTEXT - 2, ignore_eos=True
    )
    asked.session_id = body["session_id"]
    asked.sampling.temperature, asked.sampling.top_k, asked.sampling.seed = 1.0, 50, 7
    got: list[tuple[int, int]] = []
    with grpc.insecure_channel(endpoints.grpc) as channel:
        for part in api_pb2_grpc.InferenceStub(channel).GenerateStream(asked, timeout=60):
            before = len(got)
            got += enumerate(part.token_ids, part.position)
            if before <= 20 < len(got):
                midst.wait(60)
    return got


@pytest.mark.full
def test_call_forwarded_to_frozen_gateway_is_answered_here(
    swarm: HashSwarm,
) -> None:
    one, two = gateway(swarm, "still"), gateway(swarm, "there")
    made = whole(one, SEEDED | {"session_id": "call", "max_tokens": 20})
    swarm.kill("still", signal.SIGSTOP)
    asked = api_pb2.GenerateRequest(
        model="hash", prompt="go", max_tokens=20, session_id="call", ignore_eos=True
    )
    asked.sampling.temperature, asked.sampling.top_k, asked.sampling.seed = 1.0, 50, 7
    with grpc.insecure_channel(two.grpc) as channel:
        stub = api_pb2_grpc.InferenceStub(channel)
        assert list(stub.Generate(asked, timeout=30).token_ids) == made
    swarm.kill("still")
    swarm.kill("there")
