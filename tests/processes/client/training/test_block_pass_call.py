"""The call BlockPass itself: its order of messages, and wrong ones refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.processes.programs.page_examples import python_examples, run_example
from support.processes.swarm import Endpoints, Running

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

ROW = bytes(4 * 128)
GOOD: dict[str, Any] = {
    "model": "toy",
    "blocks": {"first": 0, "last": 2},
    "lengths": [3],
    "dtype": "float32",
    "hidden_size": 128,
}


@pytest.fixture
def stub(toy_swarm: Running) -> Iterator[Any]:
    with grpc.insecure_channel(toy_swarm.local.grpc) as channel:
        yield api_pb2_grpc.InferenceStub(channel)


def call(stub: Any, head: dict[str, Any] | None, *data: bytes) -> list[Any]:
    first = [] if head is None else [api_pb2.BlockPassRequest(head=api_pb2.PassHead(**head))]
    parts = [api_pb2.BlockPassRequest(data=part) for part in data]
    return list(stub.BlockPass(iter([*first, *parts]), timeout=60))


def failure(stub: Any, head: dict[str, Any] | None, *data: bytes) -> tuple[Any, str, str]:
    """Return the status, the code and the field of a refused call."""
    with pytest.raises(grpc.RpcError) as refused:
        call(stub, head, *data)
    error: Any = refused.value
    trailing = dict(error.trailing_metadata())
    return error.code(), trailing["error-code"], trailing.get("error-param", "")


def test_pass_ends_at_the_blocks_of_one_server(stub: Any) -> None:
    answers = call(stub, GOOD | {"blocks": {"first": 2, "last": 7}}, ROW, 2 * ROW)
    assert answers[0].accepted.last == 4
    assert sum(len(each.data) for each in answers[1:]) == 3 * len(ROW)


def test_example_of_the_page_runs(toy_swarm: Running) -> None:
    page = Path(__file__).parents[4] / "docs/reference/grpc.md"
    section = page.read_text("utf-8").split("\n### Forward and backward passes\n")[1]
    example = python_examples(section.split("\n## ")[0])[0]
    run_example(example, "127.0.0.1:8001", toy_swarm.local.grpc)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "other"}, "model_not_found", "model"),
    ({"blocks": {"first": 3, "last": 3}}, "invalid_request", "head.blocks"),
    ({"blocks": {"first": 0, "last": 9}}, "invalid_request", "head.blocks"),
    ({"lengths": []}, "invalid_request", "head.lengths"),
    ({"lengths": [3, 0]}, "invalid_request", "head.lengths"),
    ({"lengths": [1025]}, "invalid_request", "head.lengths"),
    ({"lengths": [1] * 4097}, "invalid_request", "head.lengths"),
    ({"prompt_rows": 4}, "invalid_request", "head.prompt_rows"),
    ({"dtype": "bfloat16"}, "invalid_request", "head.dtype"),
    ({"hidden_size": 64}, "invalid_request", "head.dtype"),
    ({"server": "x/1/y"}, "invalid_request", "head.server"),
]


@pytest.mark.full
@pytest.mark.parametrize(("fields", "code", "param"), REFUSED)
def test_wrong_head_is_refused(stub: Any, fields: dict[str, Any], code: str, param: str) -> None:
    assert failure(stub, GOOD | fields)[1:] == (code, param)


@pytest.mark.full
def test_wrong_input_is_refused(stub: Any) -> None:
    assert failure(stub, None)[1:] == ("invalid_request", "head")
    assert failure(stub, None, ROW)[1:] == ("invalid_request", "head")
    assert failure(stub, GOOD, ROW)[1:] == ("invalid_request", "data")
    assert failure(stub, GOOD, 4 * ROW)[1:] == ("invalid_request", "data")
    assert failure(stub, GOOD, ROW, b"")[1:] == ("invalid_request", "data")
    many = GOOD | {"lengths": [1000] * 3}
    assert failure(stub, many, 2049 * ROW)[1:] == ("invalid_request", "data")
    both = {"blocks": {"first": 2, "last": 6}, "backward": True}
    code, name, param = failure(stub, GOOD | both)
    assert (code, name) == (grpc.StatusCode.FAILED_PRECONDITION, "blocks_uncovered")
    assert param == "head.blocks"
    assert len(call(stub, GOOD, ROW, ROW, ROW)) > 1, "the server goes on"


@pytest.mark.full
def test_model_without_gradients_is_refused(gateway: Endpoints) -> None:
    """The hash model has rows, and no weights."""
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub: Any = api_pb2_grpc.InferenceStub(channel)
        head = GOOD | {"model": "hash", "hidden_size": 2}
        assert failure(stub, head)[1:] == ("unsupported_parameter", "head.model")
