"""Sessions of a range of blocks over gRPC, on the hash model: rows, refusals by name, and the loss of a gateway."""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.core.server import reference_rows
from support.processes.session_call import SessionCall
from support.processes.swarm import BLOCKS, ENDLESS, MODEL, Endpoints, HashSwarm, two_spans

from modelswarm_serving.model.hash_model import mix

LEASE = ("--lease", "2")
INSIDE = {"first": 1, "last": 3}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("ranges"), *LEASE, context=ENDLESS) as made:
        yield made


@pytest.fixture(scope="module")
def calm(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway(*LEASE, name="calm")


def input_rows(count: int, seed: int = 0) -> list[int]:
    """Return hashes that are finite as two float32 numbers each."""
    return [mix(seed * 10_000 + at) & 0xBFFF_FFFF_BFFF_FFFF for at in range(count)]


def step(rows: Sequence[int], **fields: Any) -> dict[str, Any]:
    tensor = {
        "dtype": "float32",
        "shape": [len(rows), 2],
        "data": struct.pack(f"<{len(rows)}Q", *rows),
    }
    wanted = {"max_tokens": 0, "return_hidden_states": True, "all_positions": True}
    return {"hidden_states": tensor} | wanted | fields


def run(call: SessionCall, rows: Sequence[int], **fields: Any) -> list[int]:
    """Run a step, and return the values of its rows."""
    parts = [answer.part for answer in call.step(**step(rows, **fields))]
    return [
        value for part in parts for (value,) in struct.iter_unpack("<Q", part.hidden_states.data)
    ]


def right(rows: Sequence[int], first: int = 1, last: int = 3) -> list[int]:
    return reference_rows(rows, dict(enumerate(rows)), last, first)


def test_rows_go_through_any_range(calm: Endpoints) -> None:
    rows = input_rows(40)
    for first, last in ((0, BLOCKS), (0, 2), (1, 3), (2, 3)):
        with SessionCall(calm.grpc) as call:
            opened = call.open(MODEL, max_length=60, blocks={"first": first, "last": last})
            assert (opened.route[0].first, opened.route[-1].last) == (first, last)
            assert (opened.blocks.first, opened.blocks.last) == (first, last)
            assert opened.position == 0
            found = run(call, rows[:30]) + run(call, rows[30:])
            assert found == right(rows, first, last)
            call.ask(rewind={"position": 7})
            assert run(call, [5, 6]) == right([*rows[:7], 5, 6], first, last)[7:]
            assert (
                run(call, [8, 9], all_positions=False)
                == right([*rows[:7], 5, 6, 8, 9], first, last)[-1:]
            )
            assert call.ask(state={}).state.position == 11


@pytest.mark.full
def test_lost_gateway_changes_no_row(swarm: HashSwarm) -> None:
    """The session is attached at another gateway, and its range with it; one more is lost in a step."""
    owner, other, third = (swarm.gateway(*LEASE, name=name) for name in ("one", "two", "three"))
    rows = input_rows(3000, seed=1)
    with SessionCall(owner.grpc) as call:
        call.open(MODEL, max_length=6000, session_id="range", keep=True, blocks=INSIDE)
        found = run(call, rows[:100])
        swarm.kill("one", signal.SIGKILL)
    with SessionCall(other.grpc) as call:
        state = call.open(MODEL, session_id="range", attach=True, keep=True)
        assert (state.blocks.first, state.blocks.last, state.position) == (1, 3, 100)
        found += run(call, rows[100:200])
    with SessionCall(third.grpc) as call:
        call.open(MODEL, session_id="range", attach=True, keep=True)
        call.send(step=step(rows[200:]))
        parts = [call.receive().part]
        swarm.kill("two", signal.SIGKILL)
        while not parts[-1].finish_reason:
            parts.append(call.receive().part)
        for part in parts:
            found += [value for (value,) in struct.iter_unpack("<Q", part.hidden_states.data)]
    assert found == right(rows)


REFUSED_STEPS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "x"}, "step.prompt"),
    ({"tokens": {"ids": [1]}}, "step.tokens"),
    ({"max_tokens": 3}, "step.max_tokens"),
    ({"return_hidden_states": False, "all_positions": False}, "step.return_hidden_states"),
    ({"return_logits": True}, "step.return_logits"),
    ({"logprobs": 1}, "step.logprobs"),
    ({"stop": ["x"]}, "step.stop"),
    ({"sampling": {"seed": 1}}, "step.sampling"),
    ({"structured_outputs": {"regex": "a"}}, "step.structured_outputs"),
    (
        {"hidden_states": {"dtype": "uint8", "shape": [1, 8], "data": b"12345678"}},
        "step.hidden_states",
    ),
    (
        {"hidden_states": {"dtype": "float32", "shape": [2, 2], "data": b"12345678"}},
        "step.hidden_states",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("fields", "param"), REFUSED_STEPS)
def test_step_without_effect_is_refused(
    calm: Endpoints, fields: dict[str, Any], param: str
) -> None:
    with SessionCall(calm.grpc) as call:
        call.open(MODEL, max_length=20, blocks=INSIDE)
        wanted = step([1, 2])
        if set(fields) & {"prompt", "tokens"}:
            del wanted["hidden_states"]
        call.send(step=wanted | fields)
        error = call.failure()
        assert dict(error.trailing_metadata())["error-param"] == param, error.details()
        assert error.details().startswith(param)


@pytest.mark.full
@pytest.mark.parametrize(
    "blocks",
    [{"first": 3, "last": 3}, {"first": 2, "last": 1}, {"first": 0, "last": BLOCKS + 1}, {}],
)
def test_blocks_that_do_not_exist_are_refused(calm: Endpoints, blocks: dict[str, int]) -> None:
    with SessionCall(calm.grpc) as call:
        call.send(open={"model": MODEL, "max_length": 20, "blocks": blocks})
        error = call.failure()
        assert dict(error.trailing_metadata())["error-param"] == "open.blocks"
        assert f"last <= {BLOCKS}" in error.details()


@pytest.mark.full
def test_session_of_blocks_answers_no_text(calm: Endpoints) -> None:
    """Only its own stream knows the range; a request that names the session is refused."""
    import grpc

    from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

    with SessionCall(calm.grpc) as call, grpc.insecure_channel(calm.grpc) as channel:
        call.open(MODEL, max_length=20, session_id="mine", blocks=INSIDE)
        run(call, [1, 2])
        stub: Any = api_pb2_grpc.InferenceStub(channel)
        for append in (False, True):
            request = api_pb2.GenerateRequest(
                model=MODEL, prompt="x", max_tokens=1, session_id="mine", append=append
            )
            with pytest.raises(grpc.RpcError, match="the session is of blocks 1:3") as refused:
                stub.Generate(request, timeout=30)
            error: Any = refused.value
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert run(call, [3]) == right([1, 2, 3])[2:]
        inside = api_pb2.BlockRange(**INSIDE)
        without = api_pb2.GenerateRequest(model=MODEL, prompt="x", blocks=inside)
        with pytest.raises(grpc.RpcError, match="only a session has blocks"):
            stub.Generate(without, timeout=30)
