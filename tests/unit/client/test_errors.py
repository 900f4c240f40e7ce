"""Errors are the same behind a pickle: pools of processes send them, and callers keep responses in files."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

from modelswarm.client.api.errors import (
    ErrorFacts,
    GatewayUnreachableError,
    NotAGatewayError,
    RateLimitError,
    bad_request,
)
from modelswarm.client.hf.errors import ArgumentError
from modelswarm.client.pipeline.errors import PipelineInterrupted
from modelswarm.client.pipeline.response import Response
from modelswarm.client.sessions.errors import ConnectionLostError, NoCapacityError
from modelswarm.errors import DocumentError, ModelSwarmError
from modelswarm.local.run_folder import SwarmStartingError


@pytest.mark.parametrize(
    "error",
    [
        bad_request("max_tokens", "-1 is not allowed"),
        RateLimitError("no room", ErrorFacts(429, "no_capacity", retry_after=3.0)),
        GatewayUnreachableError("no gateway answers", "http://a", ErrorFacts(request_id="r")),
        NotAGatewayError("something else answers", "http://a"),
        ArgumentError("top_k", "-1; allowed: 0 or more"),
        DocumentError("spec.spans", "0; allowed: 1 or more"),
        ConnectionLostError("no gateway answers", "127.0.0.1:1", "gRPC"),
        NoCapacityError("no room", 2.0),
        SwarmStartingError("one"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_is_the_same_behind_a_pickle(error: ModelSwarmError) -> None:
    error.add_note("prompt 3 of 5 failed")
    for made in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(made), str(made)) == (type(error), str(error))
        assert vars(made) == vars(error)


def test_clients_need_no_module_that_windows_lacks() -> None:
    program = "import sys; sys.modules['fcntl'] = None; import modelswarm.client.pipeline"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_interrupt_is_the_same_behind_a_pickle() -> None:
    error = PipelineInterrupted([Response("a", 1, 1), None])
    made = pickle.loads(pickle.dumps(error))
    assert (type(made), str(made), made.responses) == (type(error), str(error), error.responses)
