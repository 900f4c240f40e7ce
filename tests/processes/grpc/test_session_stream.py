"""`Inference.Session`: a session as a stream of steps, with all its positions reserved when it is opened."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from support.eventually import eventually
from support.models.tokenizers import byte_level, encode_bytes
from support.processes.session_call import SessionCall
from support.processes.swarm import BLOCKS, MODEL, VOCABULARY, Endpoints, HashSwarm, two_spans

from modelswarm.placement.plan import PAGE_SIZE
from modelswarm.protocol.messages import Sampling
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_serving.model.hash_model import reference_tokens

PAGES = 40  # of each server
LENGTH = 20 * PAGE_SIZE  # positions of a session: more than half of what new sessions may have
WARM = {"temperature": 1.0, "seed": 9}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    options = ("--pages", str(PAGES))
    with two_spans(tmp_path_factory.mktemp("steps"), *options, context=40 * PAGE_SIZE) as made:
        yield made


@pytest.fixture(scope="module")
def endpoints(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway()


@pytest.fixture
def call(endpoints: Endpoints) -> Iterator[SessionCall]:
    with SessionCall(endpoints.grpc) as made:
        yield made


def expected(log: list[int], count: int, **sampling: Any) -> list[int]:
    """Return the tokens behind this log."""
    end = len(log) + count
    return reference_tokens(
        log, Sampling(**sampling), count, end, n_blocks=BLOCKS, vocabulary=VOCABULARY
    )


def state(at: Endpoints, session: str) -> httpx.Response:
    return httpx.get(f"{at.url}/v1/sessions/{session}", timeout=60)


def has_room(at: Endpoints) -> bool:
    """Return whether a session of LENGTH can be opened; close it again."""
    with SessionCall(at.grpc) as other:
        other.send(open={"model": MODEL, "max_length": LENGTH})
        try:
            other.receive()
        except grpc.RpcError as error:
            refused: Any = error
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, refused.details()
            return False
        other.ask(close={})
    return True


def refusal(error: Any) -> tuple[str, str]:
    return error.code().name, dict(error.trailing_metadata()).get("error-param", "")


def test_open_reserves_and_close_frees_at_once(call: SessionCall, endpoints: Endpoints) -> None:
    opened = call.open(MODEL, max_length=LENGTH, ttl=60)
    assert (opened.model, opened.position) == (MODEL, 0)
    assert (opened.max_length, opened.ttl) == (LENGTH, 60)
    assert [(hop.server, hop.first, hop.last) for hop in opened.route] == [
        ("s0", 0, 2),
        ("s1", 2, 4),
    ]
    assert not has_room(endpoints), "refused before any token"
    closed = call.ask(close={})
    assert closed.HasField("closed")
    assert state(endpoints, opened.session_id).status_code == 404
    assert has_room(endpoints)


def test_steps_sample_with_their_own_parameters(call: SessionCall, endpoints: Endpoints) -> None:
    session = call.open(MODEL, max_length=LENGTH).session_id
    first = call.step(prompt="once", max_tokens=30, ignore_eos=True)
    log = encode_bytes("once")
    tokens = [token for answer in first for token in answer.part.token_ids]
    assert tokens == expected(log, 30)
    assert "".join(answer.part.text for answer in first) == byte_level().decode(tokens)
    assert first[-1].part.usage.total_tokens == first[-1].position == 34
    assert [answer.position for answer in first] == sorted(answer.position for answer in first)
    log += tokens

    sampled = call.tokens(prompt="more", max_tokens=20, ignore_eos=True, sampling=WARM)
    log += encode_bytes("more")
    assert sampled == expected(log, 20, **WARM)
    log += sampled

    ids = encode_bytes("by ids")
    assert call.tokens(tokens={"ids": ids}, max_tokens=0) == []
    log += ids
    seen = call.ask(state={})
    assert (seen.position, seen.state.position) == (len(log), len(log))
    assert state(endpoints, session).json()["position"] == len(log)

    last = call.tokens(prompt="!", max_tokens=5, ignore_eos=True)
    assert last == expected([*log, *encode_bytes("!")], 5)
    call.ask(close={})


def test_rewind_discards_what_is_behind_it(call: SessionCall) -> None:
    call.open(MODEL, max_length=LENGTH)
    log = encode_bytes("once")
    log += call.tokens(prompt="once", max_tokens=10, ignore_eos=True)
    step = {"prompt": "more", "max_tokens": 20, "ignore_eos": True, "sampling": WARM}
    first = call.tokens(**step)
    back = call.ask(rewind={"position": len(log)})
    assert (back.position, back.state.position) == (len(log), len(log))
    assert call.tokens(**step) == first == expected([*log, *encode_bytes("more")], 20, **WARM)
    call.ask(rewind={"position": 0})
    anew = call.tokens(prompt="other", max_tokens=10, ignore_eos=True)
    assert anew == expected(encode_bytes("other"), 10)
    call.send(rewind={"position": 16})
    error = call.failure()
    assert refusal(error) == ("INVALID_ARGUMENT", "rewind.position")
    assert "16; allowed: 0 to the number of entries, 15" in error.details()


def test_rows_join_the_log_and_later_steps_append_to_it(call: SessionCall) -> None:
    """Each row counts: without one of them, or in another order, the tokens are others."""
    call.open(MODEL, max_length=LENGTH)
    data = [struct.pack("<2f", at, 1.0) for at in range(3)]
    made = []
    for rows in (data, data[:2], data[::-1], data):
        call.ask(rewind={"position": 0})
        call.step(prompt="once", max_tokens=0)
        given = ROW | {"shape": [len(rows), 2], "data": b"".join(rows)}
        first = call.tokens(hidden_states=given, max_tokens=9, ignore_eos=True)
        made.append((first, call.tokens(prompt="more", max_tokens=9, ignore_eos=True)))
    assert made[0] == made[3]
    assert made[0] not in made[1:3] and made[1] != made[2]


def test_max_length_ends_an_answer(call: SessionCall) -> None:
    call.open(MODEL, max_length=12)
    parts = call.step(prompt="12345678", ignore_eos=True)
    assert parts[-1].part.finish_reason == "length"
    assert parts[-1].position == 12
    call.send(step={"prompt": "x"})
    assert refusal(call.failure()) == ("INVALID_ARGUMENT", "step.prompt")


def test_step_reports_logprobs_and_stops(call: SessionCall) -> None:
    call.open(MODEL, max_length=LENGTH)
    wanted = {"prompt": "once", "max_tokens": 30, "ignore_eos": True}
    parts = [answer.part for answer in call.step(logprobs=2, **wanted)]
    entries = [entry for part in parts for entry in part.logprobs]
    tokens = [token for part in parts for token in part.token_ids]
    assert [entry.token_id for entry in entries] == tokens
    assert {len(entry.top) for entry in entries} == {2}
    text = "".join(part.text for part in parts)
    call.ask(rewind={"position": 0})
    stopped = call.step(stop=[text[10:12]], **wanted)
    assert stopped[-1].part.finish_reason == "stop"
    assert "".join(answer.part.text for answer in stopped) == text[: text.index(text[10:12])]
    end = stopped[-1].position
    assert call.ask(state={}).state.position == end
    log = encode_bytes("once") + tokens[: end - 4]
    more = call.tokens(prompt="?", max_tokens=5, ignore_eos=True)
    assert more == expected([*log, *encode_bytes("?")], 5)


@pytest.mark.parametrize("leaves", ["cancels", "half-closes"])
def test_client_that_goes_away_frees_the_room(endpoints: Endpoints, leaves: str) -> None:
    with SessionCall(endpoints.grpc) as call:
        session = call.open(MODEL, max_length=LENGTH).session_id
        call.send(step={"prompt": "once", "ignore_eos": True})
        call.receive()
        if leaves == "cancels":
            call.cancel()
        else:
            call.end()
        eventually("its room is free", lambda: state(endpoints, session).status_code == 404)
        eventually("another one has it", lambda: has_room(endpoints))


def test_kept_session_is_attached_again(endpoints: Endpoints) -> None:
    with SessionCall(endpoints.grpc) as call:
        call.open(MODEL, max_length=LENGTH, session_id="kept", keep=True)
        log = encode_bytes("once") + call.tokens(prompt="once", max_tokens=9, ignore_eos=True)
    with SessionCall(endpoints.grpc) as call:
        seen = call.open(MODEL, session_id="kept", attach=True)
        assert (seen.position, seen.max_length) == (len(log), LENGTH)
        more = call.tokens(prompt="more", max_tokens=9, ignore_eos=True)
        assert more == expected([*log, *encode_bytes("more")], 9)
        call.ask(close={})
    with SessionCall(endpoints.grpc) as call:
        call.send(open={"model": MODEL, "session_id": "kept", "attach": True})
        assert refusal(call.failure()) == ("NOT_FOUND", "open.session_id")


def test_end_of_an_older_stream_leaves_an_attached_session(endpoints: Endpoints) -> None:
    """A client is back before the gateway has noticed that its first connection broke."""
    with SessionCall(endpoints.grpc) as older, SessionCall(endpoints.grpc) as newer:
        session = older.open(MODEL, max_length=LENGTH).session_id
        log = encode_bytes("once") + older.tokens(prompt="once", max_tokens=9, ignore_eos=True)
        assert newer.open(MODEL, session_id=session, attach=True).position == len(log)
        older.end()
        with pytest.raises(StopIteration):
            older.receive()
        more = newer.tokens(prompt="more", max_tokens=9, ignore_eos=True)
        assert more == expected([*log, *encode_bytes("more")], 9)
        newer.cancel()
        eventually("its room is free", lambda: state(endpoints, session).status_code == 404)


def test_session_is_shown_and_closed_by_unary_calls(
    call: SessionCall, endpoints: Endpoints
) -> None:
    opened = call.open(MODEL, max_length=LENGTH)
    name = api_pb2.SessionName(session_id=opened.session_id)
    with grpc.insecure_channel(endpoints.grpc) as channel:
        stub = api_pb2_grpc.InferenceStub(channel)
        shown = stub.GetSession(name, timeout=60)
        assert (shown.session_id, shown.route) == (opened.session_id, opened.route)
        stub.CloseSession(name, timeout=60)
        for gone in (stub.GetSession, stub.CloseSession):
            with pytest.raises(grpc.RpcError) as missing:
                gone(name, timeout=30)
            assert refusal(missing.value) == ("NOT_FOUND", "session_id")
    call.send(step={"prompt": "x"})
    assert call.failure().code() is grpc.StatusCode.NOT_FOUND


def test_stream_without_requests_ends_with_its_ttl(call: SessionCall, endpoints: Endpoints) -> None:
    session = call.open(MODEL, max_length=50, ttl=1).session_id
    error = call.failure()
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert dict(error.trailing_metadata())["error-code"] == "session_expired"
    eventually("it is gone", lambda: state(endpoints, session).status_code == 404)


NAN = struct.pack("<2f", math.nan, 0.0)
ROW = {"dtype": "float32", "shape": [1, 2], "data": struct.pack("<2f", 0.5, 1.0)}
OPEN = {"open": {"model": MODEL, "max_length": 50}}


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([{}], "request"),
        ([{"step": {"prompt": "x"}}], "step"),
        ([OPEN, OPEN], "open"),
        ([{"open": {"max_length": 9}}], "open.model"),
        ([{"open": {"model": MODEL}}], "open.max_length"),
        ([{"open": {"model": MODEL, "max_length": 1}}], "open.max_length"),
        ([{"open": {"model": MODEL, "max_length": 10**6}}], "open.max_length"),
        ([{"open": {"model": MODEL, "max_length": 9, "ttl": 0}}], "open.ttl"),
        ([{"open": {"model": MODEL, "max_length": 9, "session_id": "x" * 257}}], "open.session_id"),
        ([{"open": {"model": MODEL, "attach": True}}], "open.session_id"),
        (
            [{"open": {"model": MODEL, "session_id": "a", "attach": True, "ttl": 9}}],
            "open.ttl",
        ),
        ([OPEN, {"step": {}}], "step.input"),
        ([OPEN, {"step": {"prompt": ""}}], "step.prompt"),
        ([OPEN, {"step": {"prompt": "x" * 60}}], "step.prompt"),
        ([OPEN, {"step": {"tokens": {"ids": [99999]}}}], "step.tokens"),
        ([OPEN, {"step": {"prompt": "x", "sampling": {"top_p": 2}}}], "step.sampling.top_p"),
        ([OPEN, {"step": {"prompt": "x", "logprobs": 21}}], "step.logprobs"),
        ([OPEN, {"step": {"hidden_states": {}}}], "step.hidden_states"),
        ([OPEN, {"step": {"hidden_states": ROW | {"dtype": "float16"}}}], "step.hidden_states"),
        ([OPEN, {"step": {"hidden_states": ROW | {"shape": [1, 3]}}}], "step.hidden_states"),
        ([OPEN, {"step": {"hidden_states": ROW | {"shape": [2, 2]}}}], "step.hidden_states"),
        ([OPEN, {"step": {"hidden_states": ROW | {"data": b"\0" * 7}}}], "step.hidden_states"),
        ([OPEN, {"step": {"hidden_states": ROW | {"data": NAN}}}], "step.hidden_states"),
        ([OPEN, {"step": {"prompt": "x", "return_logits": True}}], "step.return_logits"),
        ([OPEN, {"step": {"prompt": "x", "all_positions": True}}], "step.all_positions"),
        (
            [OPEN, {"step": {"prompt": "x", "structured_outputs": {"regex": "("}}}],
            "step.structured_outputs.regex",
        ),
        ([OPEN, {"rewind": {"position": 1}}], "rewind.position"),
        ([OPEN, {"fork": {}}], "fork.position"),
        (
            [OPEN, {"step": {"prompt": "x", "max_tokens": 0}}, {"fork": {"position": 2}}],
            "fork.position",
        ),
        (
            [OPEN, {"step": {"prompt": "x", "max_tokens": 0}}, {"fork": {"session_id": "x" * 257}}],
            "fork.session_id",
        ),
    ],
)
def test_wrong_request_is_refused_by_name(
    call: SessionCall, endpoints: Endpoints, requests: list[dict[str, Any]], param: str
) -> None:
    for request in requests:
        call.send(**request)
    error = call.failure()
    assert refusal(error) == ("INVALID_ARGUMENT", param)
    assert error.details().startswith(param) or param == "step.prompt"
    eventually("nothing is kept", lambda: endpoints.metric("modelswarm_gateway_sessions") == 0)


def test_bytes_that_are_no_message_end_the_stream(endpoints: Endpoints) -> None:
    opened = api_pb2.SessionRequest(open=api_pb2.OpenSession(model=MODEL, max_length=50))
    with grpc.insecure_channel(endpoints.grpc) as channel:
        method: Any = channel.stream_stream("/modelswarm.v1.Inference/Session", None, None)
        with pytest.raises(grpc.RpcError) as refused:
            list(method(iter([opened.SerializeToString(), b"\xff" * 50]), timeout=30))
    assert refusal(refused.value)[0] == "INVALID_ARGUMENT"
    eventually("nothing is kept", lambda: endpoints.metric("modelswarm_gateway_sessions") == 0)
