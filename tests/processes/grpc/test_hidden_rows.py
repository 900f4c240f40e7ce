"""Rows over gRPC from the hash model: refusals by name, slow readers, and the loss of a gateway in the middle."""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import pytest
from support.core.server import expected_rows
from support.models.tokenizers import encode_bytes
from support.processes.session_call import SessionCall
from support.processes.swarm import BLOCKS, ENDLESS, MODEL, Endpoints, HashSwarm, two_spans

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

LEASE = ("--lease", "2")
WARM = {"temperature": 1.0, "seed": 9}
MANY = 1500  # tokens of a step that is disturbed


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("rows"), *LEASE, context=ENDLESS) as made:
        yield made


def step(prompt: str, count: int, **fields: Any) -> dict[str, Any]:
    wanted = {"return_hidden_states": True, "all_positions": True, "sampling": WARM}
    return {"prompt": prompt, "max_tokens": count, "ignore_eos": True} | wanted | fields


def hashes(parts: Iterable[api_pb2.GenerateResponse]) -> list[tuple[int, int]]:
    """Return the positions and values of the rows, in the order in which they came."""
    found = []
    for part in parts:
        if part.HasField("rows_position"):
            values = struct.iter_unpack("<Q", part.hidden_states.data)
            rows = [(part.rows_position + at, value) for at, (value,) in enumerate(values)]
            assert part.hidden_states.shape[0] == len(rows)
            found += rows
    return found


def generated(parts: Iterable[api_pb2.GenerateResponse]) -> list[int]:
    return [token for part in parts for token in part.token_ids]


@pytest.mark.full
def test_lost_gateway_repeats_no_row(swarm: HashSwarm) -> None:
    """The session's gateway is killed in a step; the client's gateway goes on behind the rows that it sent."""
    owner, other = (swarm.gateway(*LEASE, name=name) for name in ("owner", "other"))
    with SessionCall(owner.grpc) as call:
        call.open(MODEL, max_length=5000, session_id="rows", keep=True)
        log = encode_bytes("once") + call.tokens(**step("once", 5))
    with SessionCall(other.grpc) as call:
        call.open(MODEL, session_id="rows", attach=True)
        first = len(log)
        call.send(step=step("more" * 300, MANY))
        parts = [call.receive().part]
        while len(generated(parts)) < 20:
            parts.append(call.receive().part)
        swarm.kill("owner", signal.SIGKILL)
        while not parts[-1].finish_reason:
            parts.append(call.receive().part)
        log += encode_bytes("more" * 300) + generated(parts)
        assert len(generated(parts)) == MANY
        assert hashes(parts) == expected_rows(log[:-1], first, BLOCKS)


@pytest.mark.full
def test_gateway_lost_in_the_prompt_repeats_no_row(swarm: HashSwarm) -> None:
    owner, other = (swarm.gateway(*LEASE, name=name) for name in ("owner2", "other2"))
    with SessionCall(owner.grpc) as call:
        call.open(MODEL, max_length=60_000, session_id="prompt", keep=True)
        log = encode_bytes("once") + call.tokens(**step("once", 5))
    with SessionCall(other.grpc) as call:
        call.open(MODEL, session_id="prompt", attach=True)
        first, prompt = len(log), "more" * 10_000
        call.send(step=step(prompt, 0))
        parts = [call.receive().part]
        swarm.kill("owner2", signal.SIGKILL)
        while not parts[-1].finish_reason:
            parts.append(call.receive().part)
        log += encode_bytes(prompt)
        assert hashes(parts) == expected_rows(log, first, BLOCKS)
        assert call.ask(state={}).state.position == len(log)


REFUSED = [
    ({"return_logits": True}, "return_logits"),
    ({"all_positions": True}, "all_positions"),
    ({"rows_after": 3}, "rows_after"),
    ({"return_hidden_states": True, "n": 2}, "n"),
    ({"return_hidden_states": True, "echo": True}, "echo"),
    ({"return_hidden_states": True, "prompt_logprobs": 1}, "prompt_logprobs"),
]


@pytest.fixture(scope="module")
def calm(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway(*LEASE, name="calm")


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_unsuitable_rows_are_refused_by_name(
    calm: Endpoints, fields: dict[str, Any], param: str
) -> None:
    with grpc.insecure_channel(calm.grpc) as channel:
        stub = api_pb2_grpc.InferenceStub(channel)
        request = api_pb2.GenerateRequest(model=MODEL, prompt="x", max_tokens=1, **fields)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.GenerateStream(request, timeout=30))
        error: Any = refused.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
        assert dict(error.trailing_metadata())["error-param"] == param
        assert error.details().startswith(param)
        wanted = api_pb2.GenerateRequest(model=MODEL, prompt="x", return_hidden_states=True)
        with pytest.raises(grpc.RpcError, match="call GenerateStream"):
            stub.Generate(wanted, timeout=30)
