"""Clients of held sessions: they are told the reason, and the end."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.chaos.proxy import Network
from support.eventually import eventually
from support.processes.http_requests import (
    FOREVER,
    IDS,
    expected_tokens,
    lines,
    read_until,
    tokens_of,
    whole,
)
from support.processes.swarm import BRIEF_HOLD, ENDLESS, MODEL, Endpoints, two_spans

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

OFTEN = ("--keepalive", "0.3")
RESUMED = "modelswarm_gateway_recovery_seconds_count"
ASK = api_pb2.GenerateRequest(model=MODEL, prompt="go", max_tokens=50_000, ignore_eos=True)
PINGING = (  # a client that detects a lost gateway early
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
)


def test_held_stream_gets_comments_with_the_reason(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*OFTEN)

        def is_saved(comments: list[str]) -> bool:
            if len(comments) == 3 and "s2" not in swarm.processes:
                swarm.server("s2", "2:4")
            return endpoints.metric(RESUMED) == 1

        got, comments = read_until(endpoints, FOREVER, lambda: swarm.kill("s1"), is_saved)
        assert got == expected_tokens(len(got))
        assert f": waiting for a route: no server holds blocks 2:4 of {MODEL}" in comments
        assert endpoints.metric("modelswarm_gateway_reroutes_total") >= 1


@pytest.mark.full
def test_answer_that_has_not_begun_gets_comments(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*OFTEN)
        expected = whole(endpoints, IDS)
        swarm.kill("s1", signal.SIGSTOP)
        answer = lines(endpoints, IDS)
        try:
            assert next(answer).startswith(": waiting")
        finally:
            swarm.kill("s1", signal.SIGCONT)
        assert [token for line in answer for token in tokens_of(line)] == expected


@pytest.mark.full
def test_held_call_outlives_the_pings_of_its_client(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*OFTEN)
        with grpc.insecure_channel(endpoints.grpc, options=PINGING) as channel:
            stub = api_pb2_grpc.InferenceStub(channel)
            got: list[int] = []
            held_at = 0
            call: Any = stub.GenerateStream(ASK, timeout=60)
            for part in call:
                got += part.token_ids
                if len(got) > 20 and not held_at:
                    swarm.kill("s1")
                    time.sleep(5.0)  # three pings without data: two more than gRPC's default allows
                    swarm.server("s2", "2:4")
                    eventually("the session goes on", lambda: endpoints.metric(RESUMED) == 1)
                    held_at = len(got)
                if held_at and len(got) > held_at + 200:
                    break
            call.cancel()
            assert got == expected_tokens(len(got))


@pytest.mark.full
def test_a_held_call_is_pinged_by_its_gateway(tmp_path: Path) -> None:
    """A held call sends no data, so only pings show proxies that the connection is in use."""
    network = Network(seed=1)
    try:
        with two_spans(tmp_path, context=ENDLESS) as swarm:
            endpoints = swarm.gateway(*OFTEN)
            target = network.proxy("gateway", int(endpoints.grpc.rpartition(":")[2]))
            with grpc.insecure_channel(target) as channel:
                call: Any = api_pb2_grpc.InferenceStub(channel).GenerateStream(ASK, timeout=60)
                next(call)
                swarm.kill("s1")
                eventually("it is held", lambda: held(endpoints))
                before = network.pings["gateway"]
                time.sleep(3.0)
                pings = network.pings["gateway"] - before
                assert held(endpoints)
                call.cancel()
    finally:
        network.close()
    assert pings >= 5


def held(endpoints: Endpoints) -> bool:
    return endpoints.metric("modelswarm_gateway_sessions", state="held") == 1


@pytest.mark.full
def test_held_call_ends_with_the_reason_when_the_hold_ends(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*OFTEN, *BRIEF_HOLD)
        with grpc.insecure_channel(endpoints.grpc) as channel:
            got: list[int] = []
            ended: Any = None
            try:
                for part in api_pb2_grpc.InferenceStub(channel).GenerateStream(ASK, timeout=60):
                    got += part.token_ids
                    if len(got) > 20 and swarm.processes["s1"].poll() is None:
                        swarm.kill("s1")
            except grpc.RpcError as error:
                ended = error
        assert ended.code() is grpc.StatusCode.INTERNAL
        assert "no server holds blocks 2:4" in ended.details()
        assert ("error-code", "stream_broken") in ended.trailing_metadata()


@pytest.mark.full
def test_hold_shorter_than_keepalive_is_reported_before_its_end(tmp_path: Path) -> None:
    with two_spans(tmp_path, "--hold-limit", "2", context=ENDLESS) as swarm:
        endpoints = swarm.gateway("--keepalive", "5", detects_silence=True)
        got: list[int] = []
        received: list[str] = []
        for line in lines(endpoints, FOREVER):
            if swarm.processes["s1"].poll() is not None:
                received.append(line)
                continue
            got += tokens_of(line)
            if len(got) > 20:
                swarm.kill("s1")
        assert f": waiting for a route: no server holds blocks 2:4 of {MODEL}" in received[:-1]
        assert (
            received[-1].startswith('data: {"error"')
            and "no server holds blocks 2:4" in received[-1]
        )
        assert "was started with --hold-limit 2, this process with --fence-timeout 5" in swarm.log(
            "gateway"
        )
