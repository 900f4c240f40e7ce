"""The gRPC server in this process: bytes that are no messages, reflection, and unknown models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from support.eventually import SECONDS
from support.gateway_service import make_service_with_model

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.api.forwarding import FORWARDED_HEADER
from modelswarm_gateway.api.grpc.admin.swarm import MAX_DRAINS
from modelswarm_gateway.api.grpc.requests import parse_generate_request
from modelswarm_gateway.api.grpc.server import (
    MAX_PING_STRIKES,
    MAX_STREAMS,
    GrpcApi,
    GrpcServer,
    admin_api,
    client_api,
)
from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.metrics.grpc_requests import counted_parts
from modelswarm_gateway.runtime.node import Node
from tools.dashboard.metric_registries import MODEL

NO_MESSAGE = b"\xff" * 50
UNKNOWN_FIELD = b"\xf8\x3f\x01"
REFLECTION = ("grpc.reflection.v1", "grpc.reflection.v1alpha")


@pytest.fixture
async def gateway() -> tuple[GenerationService, Node]:
    return make_service_with_model()


@asynccontextmanager
async def served(service: GenerationService, api: GrpcApi) -> AsyncIterator[aio.Channel]:
    """Serve the API, and yield a channel to it."""
    server = GrpcServer(service, api)
    target = server.bind("--grpc", "127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(target) as made:
        yield made
    await server.stop(0.0)


@pytest.fixture
async def client(gateway: tuple[GenerationService, Node]) -> AsyncIterator[aio.Channel]:
    async with served(gateway[0], client_api(gateway[0])) as made:
        yield made


@pytest.fixture
async def admin(gateway: tuple[GenerationService, Node]) -> AsyncIterator[aio.Channel]:
    async with served(gateway[0], admin_api(gateway[0], gateway[1].drains)) as made:
        yield made


async def collect(call: Any) -> list[Any]:
    async with asyncio.timeout(SECONDS):
        return [response async for response in call]


async def call_bytes(channel: aio.Channel, method: str, request: bytes) -> Any:
    """Call a unary method with the unchanged bytes of a request."""
    return await channel.unary_unary(method, None, None)(request, timeout=SECONDS)


def counted_requests(service: GenerationService) -> dict[tuple[str, str], float]:
    """Return the requests that were counted, by model and code."""
    return {
        (sample.labels["model"], sample.labels["code"]): sample.value
        for metric in service.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "modelswarm_gateway_requests_total" and sample.value
    }


async def reflect(channel: aio.Channel, package: str, **request: Any) -> Any:
    """Return the only answer of a reflection service."""
    method = channel.stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = reflection_pb2.ServerReflectionRequest(**request)
    [answer] = await collect(method(iter([asked])))
    return answer


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("unary_unary", "modelswarm.v1.Inference/Generate"),
        ("unary_stream", "modelswarm.v1.Inference/GenerateStream"),
        ("unary_unary", "modelswarm.v1.Swarm/List"),
        ("unary_stream", "modelswarm.v1.Swarm/Watch"),
        ("unary_unary", "grpc.health.v1.Health/Check"),
        ("unary_stream", "grpc.health.v1.Health/Watch"),
        ("stream_stream", "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
    ],
)
async def test_bytes_that_are_no_message_are_invalid_argument(
    client: aio.Channel,
    admin: aio.Channel,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    method: str,
) -> None:
    caplog.set_level(logging.INFO)
    channel = admin if "Swarm" in method else client
    with pytest.raises(aio.AioRpcError) as refused:
        if kind == "unary_unary":
            await call_bytes(channel, f"/{method}", NO_MESSAGE)
        else:
            asked = iter([NO_MESSAGE]) if kind == "stream_stream" else NO_MESSAGE
            await collect(getattr(channel, kind)(f"/{method}")(asked))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a message" in (refused.value.details() or "")
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_stream"])
@pytest.mark.parametrize(
    "request_bytes", [NO_MESSAGE, UNKNOWN_FIELD, None], ids=["no message", "unknown", "none"]
)
async def test_refused_requests_are_counted_once(
    client: aio.Channel,
    gateway: tuple[GenerationService, Node],
    kind: str,
    request_bytes: bytes | None,
) -> None:
    """None: the call ends without a request, which only a stream of requests may."""
    name = {"unary_unary": "Tokenize", "unary_stream": "GenerateStream"}.get(kind, "BlockPass")
    method = f"/modelswarm.v1.Inference/{name}"
    requests = [] if request_bytes is None else [request_bytes]
    with pytest.raises(aio.AioRpcError) as refused:
        await collect(client.stream_stream(method, None, None)(iter(requests)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert counted_requests(gateway[0]) == {("other", "400"): 1}


async def test_requests_that_no_client_sent_are_not_counted(
    client: aio.Channel, admin: aio.Channel, gateway: tuple[GenerationService, Node]
) -> None:
    for channel, method in ((client, "Inference/ListModels"), (admin, "Swarm/List")):
        with pytest.raises(aio.AioRpcError):
            await call_bytes(channel, f"/modelswarm.v1.{method}", NO_MESSAGE)
    tokenize = client.unary_unary("/modelswarm.v1.Inference/Tokenize", None, None)
    with pytest.raises(aio.AioRpcError):
        await tokenize(NO_MESSAGE, timeout=SECONDS, metadata=((FORWARDED_HEADER, "1"),))
    assert counted_requests(gateway[0]) == {}


async def test_every_call_of_a_client_is_counted(
    client: aio.Channel, gateway: tuple[GenerationService, Node]
) -> None:
    def counted(code: str, model: str) -> float:
        labels = {"model": model, "code": code}
        name = "modelswarm_gateway_requests_total"
        return gateway[0].metrics.registry.get_sample_value(name, labels) or 0.0

    stub: Any = api_pb2_grpc.InferenceStub(client)
    unknown = api_pb2.TokenizeRequest(model="none", prompt="x")
    with pytest.raises(aio.AioRpcError):
        await stub.Tokenize(unknown, timeout=SECONDS)
    assert counted("404", "other") == 1
    with pytest.raises(aio.AioRpcError):
        forwarded = (("x-modelswarm-forwarded", "1"),)
        await stub.Tokenize(unknown, timeout=SECONDS, metadata=forwarded)
    assert counted("404", "other") == 1
    head = api_pb2.PassHead(model="none", blocks=api_pb2.BlockRange(first=0, last=1), lengths=[1])
    with pytest.raises(aio.AioRpcError):
        await collect(stub.BlockPass(iter([api_pb2.BlockPassRequest(head=head)])))
    assert counted("404", "other") == 2
    with pytest.raises(aio.AioRpcError):
        await collect(stub.Session(iter([api_pb2.SessionRequest(step=api_pb2.SessionStep())])))
    assert counted("400", "other") == 1


async def test_internal_error_in_a_stream_is_counted_as_500(
    gateway: tuple[GenerationService, Node],
) -> None:
    async def broken() -> AsyncGenerator[int, None]:
        yield 1
        raise ZeroDivisionError

    metrics = gateway[0].metrics
    with pytest.raises(ZeroDivisionError):
        await collect(counted_parts(metrics, lambda: MODEL, broken()))
    labels = {"model": MODEL, "code": "500"}
    name = "modelswarm_gateway_requests_total"
    assert metrics.registry.get_sample_value(name, labels) == 1


async def test_unknown_field_of_a_request_is_refused_by_its_number(client: aio.Channel) -> None:
    newer = api_pb2.GenerateRequest(model="m", prompt="x").SerializeToString() + b"\xf8\x3f\x01"
    with pytest.raises(aio.AioRpcError) as refused:
        await call_bytes(client, "/modelswarm.v1.Inference/Generate", newer)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    metadata: Any = refused.value.trailing_metadata()
    trailing = dict(metadata)
    assert (trailing["error-code"], trailing["error-param"]) == ("unknown_parameter", "1023")


async def test_guarded_methods_still_answer(client: aio.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(client)
    request = health_pb2.HealthCheckRequest()
    answer = await stub.Check(request, timeout=SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(request)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    with pytest.raises(aio.AioRpcError) as unknown:
        await call_bytes(client, "/modelswarm.v1.Inference/Nothing", b"")
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("package", REFLECTION)
@pytest.mark.parametrize("api", ["Inference", "Swarm"])
async def test_reflection_names_the_services_of_its_port(
    client: aio.Channel, admin: aio.Channel, api: str, package: str
) -> None:
    channel = admin if api == "Swarm" else client
    listed = await reflect(channel, package, list_services="")
    names = {service.name for service in listed.list_services_response.service}
    assert names == {
        "grpc.health.v1.Health",
        f"modelswarm.v1.{api}",
        *(f"{each}.ServerReflection" for each in REFLECTION),
    }
    for name in names:
        found = await reflect(channel, package, file_containing_symbol=name)
        [raw, *_] = found.file_descriptor_response.file_descriptor_proto
        file = descriptor_pb2.FileDescriptorProto.FromString(raw)
        assert name in {f"{file.package}.{service.name}" for service in file.service}


async def test_unknown_model_is_not_found(admin: aio.Channel) -> None:
    stub: Any = api_pb2_grpc.SwarmStub(admin)
    for call in (
        stub.List(api_pb2.ListRequest(model="other"), timeout=SECONDS),
        stub.Watch(api_pb2.WatchRequest(model="other"), timeout=SECONDS).read(),
        stub.Routes(api_pb2.RoutesRequest(model="other"), timeout=SECONDS),
    ):
        with pytest.raises(aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert refused.value.details() == f"'other' is not served here; known are: {MODEL}"


async def test_known_model_and_no_model_list_servers(admin: aio.Channel) -> None:
    stub: Any = api_pb2_grpc.SwarmStub(admin)
    for model in (MODEL, ""):
        listed = await stub.List(api_pb2.ListRequest(model=model), timeout=SECONDS)
        assert len(listed.servers) == 1
        watch = stub.Watch(api_pb2.WatchRequest(model=model))
        assert len((await watch.read()).servers) == 1
        watch.cancel()


async def test_admin_calls_are_not_on_the_port_of_clients(client: aio.Channel) -> None:
    for method in ("List", "Watch", "Routes", "Drain"):
        with pytest.raises(aio.AioRpcError) as refused:
            await call_bytes(client, f"/modelswarm.v1.Swarm/{method}", b"")
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_too_many_drains_are_refused(admin: aio.Channel) -> None:
    """The only server holds all blocks, so each drain waits for another server."""
    stub: Any = api_pb2_grpc.SwarmStub(admin)
    request = api_pb2.DrainRequest(server="s0", wait_seconds=3600)
    running = [stub.Drain(request) for _ in range(MAX_DRAINS)]
    for call in running:
        assert (await call.read()).uncovered_blocks
    with pytest.raises(aio.AioRpcError) as refused:
        await collect(stub.Drain(request))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    undo = api_pb2.DrainRequest(server="s0", undo=True)
    assert len(await collect(stub.Drain(undo))) == 1, "an undo is always possible"
    for call in running:
        call.cancel()
    at_once = api_pb2.DrainRequest(server="s0")
    async with asyncio.timeout(SECONDS):
        while await refusal_of(stub.Drain(at_once)) is refused.value.code():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def refusal_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(aio.AioRpcError) as refused:
        await collect(call)
    return refused.value.code()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e6])
async def test_drain_with_an_impossible_wait_is_refused(admin: aio.Channel, seconds: float) -> None:
    stub: Any = api_pb2_grpc.SwarmStub(admin)
    request = api_pb2.DrainRequest(server="s0", wait_seconds=seconds)
    assert await refusal_of(stub.Drain(request)) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("message", [{}, {"name": "x"}])
async def test_message_without_content_is_refused(
    client: aio.Channel, message: dict[str, Any]
) -> None:
    chat = api_pb2.Messages(messages=[api_pb2.Message(role="user", **message)])
    request = api_pb2.GenerateRequest(model=MODEL, chat=chat)
    with pytest.raises(aio.AioRpcError) as refused:
        await api_pb2_grpc.InferenceStub(client).Generate(request, timeout=SECONDS)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "chat.messages[0].content: this field is required"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 2.5}, "sampling.temperature: must be a number from 0 to 2, not 2.5"),
        ({"top_p": 0.0}, "sampling.top_p: must be a number above 0, at most 1, not 0"),
        ({"top_k": -2}, "sampling.top_k: must be a whole number from -1 (0 and -1: off), not -2"),
        ({"min_p": float("nan")}, "sampling.min_p: must be a number from 0 to 1, not NaN"),
    ],
)
def test_sampling_out_of_range_says_what_is_allowed(fields: dict[str, Any], message: str) -> None:
    request = api_pb2.GenerateRequest(model=MODEL, prompt="x", sampling=api_pb2.Sampling(**fields))
    with pytest.raises(ApiError) as refused:
        parse_generate_request(request)
    assert refused.value.message == message


async def watch_health(channel: aio.Channel) -> Any:
    """Start an endless call; return it once it has begun."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    call = stub.Watch(health_pb2.HealthCheckRequest())
    async with asyncio.timeout(SECONDS):
        await call.read()
    return call


async def test_streams_of_one_connection_are_bounded(client: aio.Channel) -> None:
    running = [await watch_health(client) for _ in range(MAX_STREAMS)]
    one_more = asyncio.create_task(watch_health(client))
    done, _ = await asyncio.wait({one_more}, timeout=0.2)
    assert not done, "it waits at the client"
    running.pop().cancel()
    running.append(await one_more)
    for call in running:
        call.cancel()


async def test_calls_of_all_connections_are_bounded(
    gateway: tuple[GenerationService, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelswarm_gateway.api.grpc.server.MAX_CALLS", 2)
    async with served(gateway[0], client_api(gateway[0])) as channel:
        running = [await watch_health(channel) for _ in range(2)]
        with pytest.raises(aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in running:
            call.cancel()


async def test_connection_that_pings_too_often_is_closed(
    gateway: tuple[GenerationService, Node],
) -> None:
    server = GrpcServer(gateway[0], client_api(gateway[0]))
    host, _, port = server.bind("--grpc", "127.0.0.1:0").rpartition(":")
    await server.start()
    reader, writer = await asyncio.open_connection(host, int(port))
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + bytes(8)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + ping * (MAX_PING_STRIKES + 2))
    async with asyncio.timeout(SECONDS):
        answer = await reader.read()
    assert b"too_many_pings" in answer
    writer.close()
    await server.stop(0.0)


async def test_session_stream_without_a_request_is_ended(
    gateway: tuple[GenerationService, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelswarm_gateway.api.grpc.sessions.stream.OPEN_SECONDS", 0.05)
    async with served(gateway[0], client_api(gateway[0])) as channel:
        stub: Any = api_pb2_grpc.InferenceStub(channel)
        call = stub.Session(timeout=SECONDS)
        with pytest.raises(aio.AioRpcError) as refused:
            await collect(call)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "open: it must come within 0.05 s"
