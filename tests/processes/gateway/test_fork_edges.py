"""A fork takes nothing from its parent, and finds a parent whose gateway was lost."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.processes.swarm import MODEL, Endpoints, two_spans

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.api.forwarding import CALL_SECONDS

LEASE = ("--lease", "1")
PAGES = 40  # of 16 positions


def fork(at: Endpoints, session: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{at.url}/v1/sessions/{session}/fork", json=fields, timeout=60)


def turn(
    at: Endpoints, session: str, text: str, timeout: float = 60, **fields: Any
) -> httpx.Response:
    body = {"model": MODEL, "prompt": text, "session_id": session, "max_tokens": 5} | fields
    return httpx.post(f"{at.url}/v1/completions", json=body, timeout=timeout)


def test_fork_without_room_is_refused_and_its_parent_stays(tmp_path: Path) -> None:
    with two_spans(tmp_path, "--pages", str(PAGES)) as swarm:
        gateway = swarm.gateway()
        text = "a" * 16 * (PAGES * 2 // 3)
        assert turn(gateway, "trunk", text).status_code == 200
        made = fork(gateway, "trunk")
        assert (made.status_code, made.json()["error"]["code"]) == (429, "no_capacity")
        assert turn(gateway, "trunk", "b", append=True).status_code == 200


def test_session_of_a_lost_gateway_is_forked_at_another_one(tmp_path: Path) -> None:
    with two_spans(tmp_path, *LEASE) as swarm:
        owner, other = swarm.gateway(*LEASE, name="owner"), swarm.gateway(*LEASE, name="other")
        assert turn(owner, "trunk", "hello").status_code == 200
        swarm.kill("owner")
        made = fork(other, "trunk", session_id="branch")
        assert (made.status_code, made.json()["position"]) == (200, len("hello") + 5)
        assert turn(other, "trunk", "b", append=True).status_code == 200


@pytest.mark.full  # depends on timing: the turn comes within the search
def test_fork_goes_on_when_a_turn_of_its_parent_is_left(tmp_path: Path) -> None:
    """While names are searched for, the parent begins a turn, whose client leaves before its first token."""
    with two_spans(tmp_path) as swarm, ThreadPoolExecutor(1) as pool:
        gateway = swarm.gateway()
        assert turn(gateway, "trunk", "hello").status_code == 200
        swarm.kill("s1", signal.SIGSTOP)  # the search waits for its answer for 3 s
        made = pool.submit(fork, gateway, "trunk", session_id="branch")
        time.sleep(1)
        with pytest.raises(httpx.ReadTimeout):
            turn(gateway, "trunk", "b", timeout=3.5, append=True)
        swarm.kill("s1", signal.SIGCONT)
        answer = made.result()
        assert answer.status_code == 200, answer.text
        assert answer.json()["position"] == len("hello") + 5


@pytest.mark.full  # depends on timing: the hold limit ends behind the search, and before the links do (9 s)
def test_fork_goes_on_when_a_turn_of_its_parent_fails(tmp_path: Path) -> None:
    """As above, but no server has the last blocks for longer than the parent's turn may wait."""
    with two_spans(tmp_path) as swarm, ThreadPoolExecutor(2) as pool:
        gateway = swarm.gateway("--hold-limit", "4")
        assert turn(gateway, "trunk", "hello").status_code == 200
        swarm.kill("s1", signal.SIGSTOP)
        made = pool.submit(fork, gateway, "trunk", session_id="branch")
        time.sleep(1)
        failed = turn(gateway, "trunk", "b", append=True)
        swarm.kill("s1", signal.SIGCONT)
        assert failed.status_code == 503, failed.text  # it had not started, so the session stays
        answer = made.result()
        assert answer.status_code == 200, answer.text
        assert answer.json()["position"] == len("hello") + 5


@pytest.mark.full  # depends on timing: the fork takes longer than other calls may, and ends before the links do (9 s)
def test_slow_fork_is_awaited_over_grpc_at_another_gateway(tmp_path: Path) -> None:
    with two_spans(tmp_path) as swarm, ThreadPoolExecutor(1) as pool:
        owner, other = swarm.gateway(name="owner"), swarm.gateway(name="other")
        assert turn(owner, "trunk", "hello").status_code == 200
        with grpc.insecure_channel(other.grpc) as channel:
            stub: Any = api_pb2_grpc.InferenceStub(channel)
            request = api_pb2.ForkSessionRequest(model=MODEL, session_id="trunk")
            swarm.kill("s1", signal.SIGSTOP)
            made = pool.submit(stub.ForkSession, request, timeout=60)
            time.sleep(CALL_SECONDS + 3)
            swarm.kill("s1", signal.SIGCONT)
            assert made.result().position == len("hello") + 5
