"""Sessions that a caller leaves in the middle of a step, or in the child of a fork. The gateway is a stand-in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.ports import inference_port
from typing_extensions import override

from modelswarm.client.sessions.connection import Connection
from modelswarm.client.sessions.session import GatewaySession, StepOptions
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

FORKED = """
import gc, os, signal, sys
from modelswarm.client.sessions.connection import Connection
from modelswarm.client.sessions.session import GatewaySession, StepOptions
from modelswarm.errors import UserError
session = GatewaySession(Connection(sys.argv[1]), "m", 5000)
session.run_step([1], StepOptions(1))
if not (child := os.fork()):
    signal.alarm(30)
    try:
        session.run_step([2], StepOptions(1))
    except UserError as error:
        print(error, flush=True)
    session.close()
    del session
    gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
session.run_step([3], StepOptions(1))
print(session.tokens)
session.close()
"""


class Sevens(api_pb2_grpc.InferenceServicer):
    """A gateway whose model says 7, each in a part of its own."""

    def __init__(self) -> None:
        self.inputs: list[list[list[int]]] = []  # of each step of each session

    @override
    def Session(self, requests: Any, context: Any) -> Any:
        steps: list[list[int]] = []
        self.inputs.append(steps)
        position = 0
        for request in requests:
            match request.WhichOneof("request"):
                case "step":
                    steps.append(list(request.step.tokens.ids))
                    position += len(steps[-1])
                    count = request.step.max_tokens
                    for number in range(max(1, count)):
                        tokens = [7] * min(1, count)
                        position += len(tokens)
                        finish = "length" if number + 1 >= count else ""
                        part = api_pb2.GenerateResponse(token_ids=tokens, finish_reason=finish)
                        yield api_pb2.SessionResponse(position=position, part=part)
                case "close":
                    yield api_pb2.SessionResponse(closed=api_pb2.SessionClosed())
                    return
                case other:
                    position = request.rewind.position if other == "rewind" else position
                    state = api_pb2.SessionState(session_id="s", position=position)
                    yield api_pb2.SessionResponse(position=position, state=state)


@pytest.fixture
def gateway() -> Sevens:
    return Sevens()  # type: ignore[abstract]  # it is asked for nothing else


@pytest.fixture
def target(gateway: Sevens) -> Iterator[str]:
    with inference_port(gateway) as target:
        yield target


@pytest.mark.parametrize(
    ("count", "inputs"),
    [(50, [[[1], [2]]]), (2000, [[[1]], [[1, 7, 2]]])],
    ids=["short", "long"],
)
def test_step_behind_one_that_was_left_is_soon_done(
    target: str, gateway: Sevens, count: int, inputs: list[list[list[int]]]
) -> None:
    """Ctrl-C in a notebook leaves a step; its answer may take minutes."""
    with GatewaySession(Connection(target), "m", 5000) as session:
        parts: Any = session.step([1], StepOptions(count))
        next(parts)
        parts.close()
        session.run_step([2], StepOptions(0))
        assert session.tokens == (1, 7, 2)
    assert gateway.inputs == inputs


def test_child_of_a_fork_leaves_the_session_of_its_parent(target: str, gateway: Sevens) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKED, target],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    said = "gateway: the connection was made in another process; make one in this process\n"
    assert (ended.returncode, ended.stdout) == (0, f"{said}(1, 7, 3, 7)\n"), ended.stderr
    assert gateway.inputs == [[[1], [3]]]
