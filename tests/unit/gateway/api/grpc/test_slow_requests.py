"""Calls whose requests come late or not at all, and watches without an end, on the real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.eventually import SECONDS
from support.gateway_service import make_service_with_model

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.api.grpc.interceptor import malformed_requests, slow_messages
from modelswarm_gateway.api.grpc.server import GrpcServer, client_api
from tools.dashboard.metric_registries import MODEL

SERVICE = "modelswarm.v1.Inference"
METHODS = ("Generate", "GenerateStream", "ListModels", "Session")


@pytest.fixture
async def client() -> AsyncIterator[aio.Channel]:
    service, _ = make_service_with_model()
    server = GrpcServer(service, client_api(service))
    target = server.bind("--grpc", "127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(target) as made:
        yield made
    await server.stop(0.0)


def open_call(channel: Any, method: str) -> Any:
    """Open a call of the method; its requests are bytes that the test writes."""
    return channel.stream_stream(f"/{SERVICE}/{method}")()


async def open_without_request(channel: aio.Channel, method: str) -> Any:
    """Open a call of the method, of which no request ever comes."""
    call = open_call(channel, method)
    await call.wait_for_connection()
    return call


async def code_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(SECONDS):
        found: grpc.StatusCode = await call.code()
        return found


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_without_a_request_ends(
    client: aio.Channel, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_messages, "SLOW_SECONDS", 0.1)
    call = await open_without_request(client, method)
    assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
    assert "did not arrive within 0.1 s" in await call.details()


async def test_slow_requests_are_bounded_and_others_go_on(
    client: aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_messages, "MAX_SLOW", 2)
    calls = [await open_without_request(client, "Generate") for _ in range(3)]
    ends = [asyncio.ensure_future(code_of(call)) for call in calls]
    (refused,), _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    assert refused.result() is grpc.StatusCode.RESOURCE_EXHAUSTED
    models = await api_pb2_grpc.InferenceStub(client).ListModels(api_pb2.ListModelsRequest())
    assert [model.id for model in models.models] == [MODEL]
    assert sum(end.done() for end in ends) == 1
    for call in calls:
        call.cancel()
    await asyncio.gather(*ends)


async def test_a_call_that_ends_without_a_request_is_refused(client: aio.Channel) -> None:
    call = open_call(client, "Generate")
    await call.done_writing()
    assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
    assert await call.details() == "the call has no request message"


async def test_watches_of_the_health_are_bounded(
    client: aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(malformed_requests, "MAX_WATCHES", 1)
    watch = health_pb2_grpc.HealthStub(client).Watch
    first = watch(health_pb2.HealthCheckRequest())
    await first.read()
    second = watch(health_pb2.HealthCheckRequest())
    assert await code_of(second) is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()
