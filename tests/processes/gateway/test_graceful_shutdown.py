"""A gateway that shuts down: it reports the shutdown, still serves late clients, and finishes its answers."""

from __future__ import annotations

import contextlib
import http.client
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.eventually import eventually
from support.processes.http_requests import IDS, lines, tokens_of
from support.processes.swarm import CONTEXT, MODEL, Endpoints, HashSwarm, two_spans

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

pytestmark = pytest.mark.full

SHORT = {"model": MODEL, "prompt": "go", "max_tokens": 2, "ignore_eos": True}


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[HashSwarm]:
    with two_spans(tmp_path) as swarm:
        yield swarm


def leave(swarm: HashSwarm, endpoints: Endpoints) -> None:
    swarm.kill("gateway", signal.SIGTERM)
    eventually("it says that it leaves", lambda: not swarm.is_ready(endpoints))


def test_stopping_gateway_serves_late_clients_and_closes(
    swarm: HashSwarm,
) -> None:
    endpoints = swarm.gateway("--shutdown-delay", "2", "--drain-timeout", "5")
    began = time.monotonic()
    leave(swarm, endpoints)
    assert time.monotonic() - began < 2.0
    assert "stopping" in httpx.get(f"{endpoints.url}/ready", timeout=5).json()["reason"]
    assert httpx.get(f"{endpoints.url}/live", timeout=5).status_code == 200
    late = httpx.post(f"{endpoints.url}/v1/completions", json=SHORT, timeout=10)
    assert late.status_code == 200
    assert late.headers["connection"] == "close"
    assert swarm.processes["gateway"].wait(10) == 0
    assert 2.0 <= time.monotonic() - began < 5.0


def test_stopping_gateway_exits_when_requests_cease(swarm: HashSwarm) -> None:
    endpoints = swarm.gateway("--shutdown-delay", "2", "--drain-timeout", "10")
    leave(swarm, endpoints)
    began = last = time.monotonic()
    while last - began < 3.0:
        last = time.monotonic()
        assert (
            httpx.post(f"{endpoints.url}/v1/completions", json=SHORT, timeout=10).status_code == 200
        )
        time.sleep(0.1)
    assert swarm.processes["gateway"].wait(10) == 0
    assert time.monotonic() - last >= 2.0


def test_constant_requests_do_not_keep_the_gateway(swarm: HashSwarm) -> None:
    endpoints = swarm.gateway("--shutdown-delay", "1", "--drain-timeout", "2")
    began = time.monotonic()
    leave(swarm, endpoints)
    with contextlib.suppress(httpx.TransportError):  # after its exit
        while httpx.post(f"{endpoints.url}/v1/completions", json=SHORT, timeout=10).is_success:
            assert time.monotonic() - began < 5.0
    assert time.monotonic() - began > 1.0
    assert swarm.processes["gateway"].wait(10) == 0


def test_kept_connection_closes_after_its_next_answer(swarm: HashSwarm) -> None:
    endpoints = swarm.gateway("--shutdown-delay", "2")
    kept = http.client.HTTPConnection(endpoints.http, timeout=10)
    kept.request("GET", "/health")
    first = kept.getresponse()
    first.read()
    assert not first.will_close
    leave(swarm, endpoints)
    kept.request("GET", "/health")
    last = kept.getresponse()
    last.read()
    assert last.will_close
    assert kept.sock is None
    assert swarm.processes["gateway"].wait(10) == 0


def test_idle_connection_is_closed_before_answers_end(swarm: HashSwarm) -> None:
    endpoints = swarm.gateway("--drain-timeout", "20")
    idle = http.client.HTTPConnection(endpoints.http, timeout=10)
    idle.request("GET", "/health")
    idle.getresponse().read()
    stream = lines(endpoints, IDS)
    got = tokens_of(next(stream))
    leave(swarm, endpoints)
    assert idle.sock is not None
    assert idle.sock.recv(1) == b""
    idle.close()
    got += [token for line in stream for token in tokens_of(line)]
    assert len(got) == CONTEXT - 2
    assert swarm.processes["gateway"].wait(10) == 0


def test_grpc_clients_learn_of_the_stop_before_the_exit(swarm: HashSwarm) -> None:
    endpoints = swarm.gateway("--shutdown-delay", "1.5", "--drain-timeout", "20")
    with grpc.insecure_channel(endpoints.grpc) as channel:
        stub = api_pb2_grpc.InferenceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        watching = iter(health.Watch(health_pb2.HealthCheckRequest(), timeout=30))
        status = health_pb2.HealthCheckResponse
        assert next(watching).status == status.SERVING
        ask = api_pb2.GenerateRequest(model=MODEL, prompt="go", max_tokens=400, ignore_eos=True)
        running = iter(stub.GenerateStream(ask, timeout=30))
        tokens = len(next(running).token_ids)
        leave(swarm, endpoints)
        assert next(watching).status == status.NOT_SERVING
        short = api_pb2.GenerateRequest(model=MODEL, prompt="go", max_tokens=2, ignore_eos=True)
        assert stub.Generate(short, timeout=10).usage.completion_tokens == 2
        assert tokens + sum(len(part.token_ids) for part in running) == 400
        began = time.monotonic()  # an endless call, such as this watch, delays nothing
        assert swarm.processes["gateway"].wait(10) == 0
        assert time.monotonic() - began < 6.0
        with pytest.raises(grpc.RpcError) as refused:
            stub.Generate(short, timeout=2)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError):
            next(watching)


def test_too_many_swarm_watchers_are_refused(swarm: HashSwarm) -> None:
    endpoints = swarm.gateway()
    with grpc.insecure_channel(endpoints.admin) as channel:
        stub = api_pb2_grpc.SwarmStub(channel)
        watching = [stub.Watch(api_pb2.WatchRequest(), timeout=30) for _ in range(64)]
        for each in watching:
            next(iter(each))
        with pytest.raises(grpc.RpcError) as refused:
            next(iter(stub.Watch(api_pb2.WatchRequest(), timeout=10)))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for each in watching:
            each.cancel()  # type: ignore[no-untyped-call]
        eventually("there is room again", lambda: can_watch(stub))


def can_watch(stub: api_pb2_grpc.SwarmStub) -> bool:
    try:
        call = stub.Watch(api_pb2.WatchRequest(), timeout=5)
        next(iter(call))
        call.cancel()  # type: ignore[no-untyped-call]
    except grpc.RpcError:
        return False
    return True
