"""Rows of blocks over gRPC, from the hash model: its tokens after several steps, and refusals by name."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from support.core.server import reference_rows
from support.processes.session_call import SessionCall
from support.processes.swarm import BLOCKS, MODEL, VOCABULARY, Endpoints, two_spans

from modelswarm.protocol.messages import Sampling
from modelswarm.protocol.opaque import opaque_entries
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_serving.model.hash_model import mix, sample_token

COUNT, NEW = 5, 12
FINITE = 0xBFFF_FFFF_BFFF_FFFF  # both halves of a value are finite float32
ROWS = [[mix(at * 10 + n) & FINITE for n in range(1 + BLOCKS)] for at in range(COUNT)]
INPUT = [7, 8, 9]


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    with two_spans(tmp_path_factory.mktemp("prompts")) as swarm:
        yield swarm.gateway()


def tensor(*shape: int, values: Sequence[int] = (), **changes: Any) -> dict[str, Any]:
    """Return rows of the hash model, of these values or of zeros."""
    count = len(values) or 1
    for size in shape[:-1] if not values else ():
        count *= size
    data = struct.pack(f"<{count}Q", *(values or [0] * count))
    return {"dtype": "float32", "shape": shape, "data": data} | changes


def rows(first: int, last: int) -> dict[str, Any]:
    """Return the fields of a step with rows [first, last)."""
    values = [value for row in ROWS[first:last] for value in row]
    return {
        "hidden_states": tensor(last - first, 1 + BLOCKS, 2, values=values),
        "max_tokens": 0,
    }


def right(log: list[int], count: int = COUNT) -> list[int]:
    """Return the tokens behind the log, which begins with `count` of the rows."""
    packed = [struct.pack(f"<{1 + BLOCKS}Q", *row) for row in ROWS[:count]]
    log = [*opaque_entries(packed), *log]
    opaque = {at: row[0] for at, row in enumerate(ROWS[:count])}
    prompts = {at: row[1:] for at, row in enumerate(ROWS[:count])}
    begin = len(log)
    for _ in range(NEW):
        row = reference_rows(log, opaque, BLOCKS, prompts=prompts)[-1]
        log.append(sample_token(row, Sampling(), len(log), log, begin, VOCABULARY).token)
    return log[begin:]


def answer(call: SessionCall) -> list[int]:
    greedy = {"temperature": 0.0}
    wanted = {"max_tokens": NEW, "ignore_eos": True, "sampling": greedy}
    return call.tokens(tokens={"ids": INPUT}, **wanted)


def test_rows_come_in_several_steps(endpoints: Endpoints) -> None:
    with SessionCall(endpoints.grpc) as call:
        call.open(MODEL, max_length=100)
        for first, last in ((0, 2), (2, 3), (3, COUNT)):
            call.step(**rows(first, last))
        assert answer(call) == right(INPUT)
        call.ask(rewind={"position": 2})
        assert answer(call) == right(INPUT, 2)


def test_model_lists_that_it_takes_them(endpoints: Endpoints) -> None:
    with grpc.insecure_channel(endpoints.grpc) as channel:
        stub = api_pb2_grpc.InferenceStub(channel)
        [model] = stub.ListModels(api_pb2.ListModelsRequest(), timeout=60).models
    assert model.block_rows


WRONG: list[tuple[dict[str, Any], str]] = [
    (tensor(2, BLOCKS, 2), "shape is [2, 4, 2]; it must be [rows, 5, 2]"),
    (tensor(0, 1 + BLOCKS, 2, data=b""), "with at least one row"),
    (tensor(2, 1 + BLOCKS, 2, dtype="float16"), "dtype is 'float16'"),
    (tensor(2, 1 + BLOCKS, 2, data=b"12"), "data has 2 bytes; 80 make this shape"),
]


@pytest.mark.parametrize(("given", "sentence"), WRONG)
def test_unsuitable_rows_are_refused_by_name(
    endpoints: Endpoints, given: dict[str, Any], sentence: str
) -> None:
    with grpc.insecure_channel(endpoints.grpc) as channel:
        stub = api_pb2_grpc.InferenceStub(channel)
        request = api_pb2.GenerateRequest(
            model=MODEL, max_tokens=1, hidden_states=api_pb2.Tensor(**given)
        )
        with pytest.raises(grpc.RpcError) as refused:
            stub.Generate(request, timeout=30)
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
    assert dict(error.trailing_metadata())["error-param"] == "hidden_states"
    assert error.details().startswith("hidden_states: ") and sentence in error.details()


PLAIN = {"hidden_states": tensor(1, 2), "max_tokens": 0}


@pytest.mark.parametrize(
    ("before", "then", "sentence"),
    [
        ({"tokens": {"ids": [1]}, "max_tokens": 0}, rows(0, 1), "is after 1 entries"),
        (rows(0, 2), PLAIN, "the session begins with rows of blocks"),
    ],
)
def test_other_rows_in_a_session_are_refused_by_name(
    endpoints: Endpoints, before: dict[str, Any], then: dict[str, Any], sentence: str
) -> None:
    with SessionCall(endpoints.grpc) as call:
        call.open(MODEL, max_length=100)
        call.step(**before)
        call.send(step=then)
        error = call.failure()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("step.hidden_states: ") and sentence in error.details()


def test_session_of_blocks_refuses_them_by_name(endpoints: Endpoints) -> None:
    with SessionCall(endpoints.grpc) as call:
        call.open(MODEL, max_length=100, blocks={"first": 0, "last": 2})
        call.send(step=rows(0, 1) | {"return_hidden_states": True})
        assert call.failure().details().startswith("step.hidden_states: ")
