"""The gRPC API of a real gateway over real server processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from support.eventually import eventually
from support.models.tokenizers import byte_level, encode_bytes
from support.processes.swarm import (
    BRIEF_HOLD,
    CONTEXT,
    ENDLESS,
    MODEL,
    Endpoints,
    HashSwarm,
    two_spans,
)

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("grpc")) as made:
        yield made


@pytest.fixture(scope="module")
def endpoints(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway()


@pytest.fixture
def channel(endpoints: Endpoints) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(endpoints.grpc) as made:
        yield made


@pytest.fixture
def admin(endpoints: Endpoints) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(endpoints.admin) as made:
        yield made


def request(**fields: Any) -> api_pb2.GenerateRequest:
    if not {"prompt", "chat", "tokens"} & fields.keys():
        fields["prompt"] = "tell me"
    known: dict[str, Any] = {"model": MODEL, "max_tokens": 30, "ignore_eos": True}
    return api_pb2.GenerateRequest(**known | fields)


def inference(channel: grpc.Channel) -> Any:
    return api_pb2_grpc.InferenceStub(channel)


def health(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


def trailing_of(error: Any) -> dict[str, str]:
    return dict(error.trailing_metadata())


def generate(channel: grpc.Channel, **fields: Any) -> api_pb2.GenerateResponse:
    answer: api_pb2.GenerateResponse = inference(channel).Generate(request(**fields), timeout=60)
    return answer


def failure(channel: grpc.Channel, asked: api_pb2.GenerateRequest) -> tuple[str, dict[str, str]]:
    """Return status and trailing metadata, which both methods must share."""
    stub = inference(channel)
    with pytest.raises(grpc.RpcError) as unary:
        stub.Generate(asked, timeout=30)
    with pytest.raises(grpc.RpcError) as streamed:
        list(stub.GenerateStream(asked, timeout=30))
    assert unary.value.code() is streamed.value.code()
    assert unary.value.details() == streamed.value.details()
    return unary.value.code().name, trailing_of(unary.value)


def test_one_answer_has_text_tokens_position_and_usage(channel: grpc.Channel) -> None:
    answer = generate(channel)
    assert answer.id.startswith("gen-")
    assert len(answer.token_ids) == 30
    assert answer.text == byte_level().decode(list(answer.token_ids))
    assert answer.position == len("tell me")
    assert answer.finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 30, 37)


def test_a_stream_gives_the_same_in_pieces(channel: grpc.Channel) -> None:
    whole = generate(channel)
    parts = list(inference(channel).GenerateStream(request(), timeout=60))
    assert "".join(part.text for part in parts) == whole.text
    assert [t for part in parts for t in part.token_ids] == list(whole.token_ids)
    assert {part.finish_reason for part in parts[:-1]} <= {""}
    assert (parts[-1].finish_reason, parts[-1].usage) == ("length", whole.usage)
    position = len("tell me")
    for part in parts:
        assert part.position == position
        position += len(part.token_ids)


def test_http_and_grpc_give_the_same(channel: grpc.Channel, endpoints: Endpoints) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    by_http = httpx.post(f"{endpoints.url}/v1/chat/completions", json=body, timeout=60).json()
    chat = api_pb2.Messages(messages=[api_pb2.Message(role="user", content="hi")])
    by_grpc = generate(channel, chat=chat, max_tokens=20, ignore_eos=False)
    assert by_grpc.text == by_http["choices"][0]["message"]["content"]
    assert by_grpc.usage.total_tokens == by_http["usage"]["total_tokens"]


def test_token_prompt_zero_tokens_and_stop_strings(channel: grpc.Channel) -> None:
    by_text = generate(channel)
    by_tokens = generate(channel, tokens=api_pb2.TokenIds(ids=encode_bytes("tell me")))
    assert by_tokens.text == by_text.text
    assert generate(channel, max_tokens=0).finish_reason == "length"
    stop = by_text.text[10:12]
    stopped = generate(channel, stop=[stop])
    assert stopped.text == by_text.text[: by_text.text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_sampling_is_taken_and_zero_is_not_unset(channel: grpc.Channel) -> None:
    def text(**fields: Any) -> str:
        return str(generate(channel, sampling=api_pb2.Sampling(**fields)).text)

    assert text(temperature=1, seed=5) == text(temperature=1, seed=5) != text(temperature=1, seed=6)
    assert text(temperature=0, seed=5) == generate(channel).text


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": ""}, "INVALID_ARGUMENT", "invalid_request", "model"),
        ({"model": "gpt-9"}, "NOT_FOUND", "model_not_found", "model"),
        ({"prompt": ""}, "INVALID_ARGUMENT", "invalid_request", "prompt"),
        ({"prompt": "x" * CONTEXT}, "INVALID_ARGUMENT", "context_length_exceeded", "prompt"),
        ({"tokens": api_pb2.TokenIds(ids=[9999])}, "INVALID_ARGUMENT", "invalid_request", "tokens"),
        ({"chat": api_pb2.Messages()}, "INVALID_ARGUMENT", "invalid_request", "chat.messages"),
        (
            {"chat": api_pb2.Messages(messages=[api_pb2.Message(role="robot")])},
            "INVALID_ARGUMENT",
            "invalid_request",
            "chat.messages[0].role",
        ),
        ({"stop": [""]}, "INVALID_ARGUMENT", "invalid_request", "stop[0]"),
        (
            {"sampling": api_pb2.Sampling(temperature=-1)},
            "INVALID_ARGUMENT",
            "invalid_request",
            "sampling.temperature",
        ),
        (
            {"sampling": api_pb2.Sampling(top_p=float("nan"))},
            "INVALID_ARGUMENT",
            "invalid_request",
            "sampling.top_p",
        ),
    ],
)
def test_failures_have_the_status_and_the_codes_of_http(
    channel: grpc.Channel, fields: dict[str, Any], status: str, code: str, param: str
) -> None:
    got, trailing = failure(channel, request(**fields))
    assert (got, trailing["error-code"], trailing["error-param"]) == (status, code, param)


def test_a_request_without_input_is_refused(channel: grpc.Channel) -> None:
    status, trailing = failure(channel, api_pb2.GenerateRequest(model=MODEL))
    assert (status, trailing["error-param"]) == ("INVALID_ARGUMENT", "input")


def test_a_call_that_is_cancelled_ends_its_session(
    channel: grpc.Channel, endpoints: Endpoints
) -> None:
    for _ in range(10):
        stream = inference(channel).GenerateStream(request(max_tokens=500))
        next(stream)
        stream.cancel()
    eventually("no session is left", lambda: endpoints.metric("modelswarm_gateway_sessions") == 0)


def test_the_swarm_lists_servers_and_sessions(
    channel: grpc.Channel, admin: grpc.Channel, swarm: HashSwarm
) -> None:
    stub = api_pb2_grpc.SwarmStub(admin)
    generate(channel, session_id="kept")

    def beaten() -> api_pb2.Snapshot | None:
        now = stub.List(api_pb2.ListRequest(), timeout=60)
        return now if all(server.total_pages for server in now.servers) else None

    now = eventually("heartbeats have come", beaten)
    [model] = now.models
    assert (model.model, model.n_blocks, model.ready) == (MODEL, 4, True)
    spans = sorted((server.first, server.last, server.health) for server in now.servers)
    assert spans == [(0, 2, "linked"), (2, 4, "linked")]
    assert {server.peer for server in now.servers} == {
        swarm.member(n)["peer"] for n in ("s0", "s1")
    }
    [session] = [s for s in now.sessions if s.state == "parked"]
    assert session.length == len("tell me") + 30
    assert [(hop.first, hop.last) for hop in session.route] == [(0, 2), (2, 4)]
    with pytest.raises(grpc.RpcError) as unknown:
        stub.List(api_pb2.ListRequest(model="other"), timeout=10)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_watch_reports_a_server_that_joins_and_leaves(
    admin: grpc.Channel, swarm: HashSwarm
) -> None:
    stub: Any = api_pb2_grpc.SwarmStub(admin)
    watch = stub.Watch(api_pb2.WatchRequest(), timeout=300)
    assert len(next(watch).servers) == 2
    swarm.server("s2", "1:4")
    assert any(len(now.servers) == 3 for now in watch)
    swarm.kill("s2")
    assert any(len(now.servers) == 2 for now in watch)
    watch.cancel()


def test_health_is_per_service(channel: grpc.Channel, admin: grpc.Channel) -> None:
    for port, service in ((channel, "modelswarm.v1.Inference"), (admin, "modelswarm.v1.Swarm")):
        for name in ("", service):
            answer = health(port).Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_names_the_services(channel: grpc.Channel, admin: grpc.Channel) -> None:
    for port, service in ((channel, "modelswarm.v1.Inference"), (admin, "modelswarm.v1.Swarm")):
        database = ProtoReflectionDescriptorDatabase(port)
        names = set(database.get_services())
        assert {name for name in names if name.startswith("modelswarm")} == {service}
        assert "grpc.health.v1.Health" in names
        assert database.FindFileContainingSymbol(service).package == "modelswarm.v1"


def test_clients_port_has_no_admin_calls(channel: grpc.Channel) -> None:
    stub: Any = api_pb2_grpc.SwarmStub(channel)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: stub.List(api_pb2.ListRequest(), timeout=60),
        lambda: stub.Routes(api_pb2.RoutesRequest(), timeout=60),
        lambda: next(stub.Watch(api_pb2.WatchRequest(), timeout=60)),
        lambda: next(stub.Drain(api_pb2.DrainRequest(server="s0"), timeout=60)),
    )
    for call in calls:
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.full
def test_broken_session_is_internal_and_then_unavailable(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with two_spans(tmp_path_factory.mktemp("broken"), context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*BRIEF_HOLD)
        with grpc.insecure_channel(endpoints.grpc) as channel:
            stream = inference(channel).GenerateStream(request(max_tokens=50_000))
            next(stream)
            swarm.kill("s0")
            with pytest.raises(grpc.RpcError) as broken:
                list(stream)
            assert broken.value.code() is grpc.StatusCode.INTERNAL
            assert trailing_of(broken.value)["error-code"] == "stream_broken"
            status, _ = failure(channel, request())
            assert status == "UNAVAILABLE"
            asked = health_pb2.HealthCheckRequest(service="modelswarm.v1.Inference")
            eventually(
                "not serving",
                lambda: (
                    health(channel).Check(asked).status
                    == health_pb2.HealthCheckResponse.NOT_SERVING
                ),
            )


def test_announcement_names_the_grpc_addresses(endpoints: Endpoints, swarm: HashSwarm) -> None:
    run_file = json.loads((swarm.root / "gateway.json").read_text())
    assert (run_file["grpc"], run_file["admin"]) == (endpoints.grpc, endpoints.admin)
    assert run_file["peer"].startswith("gateway/")
