"""Query parameters, headers and fields of gRPC requests that this gateway does not know; headers of responses."""

from __future__ import annotations

import logging

import httpx
import pytest
from google.protobuf.message import Message
from support.gateway_service import make_service_with_model

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.fields.headers import REFUSED_HEADERS
from modelswarm_gateway.api.grpc.interceptor.malformed_requests import MAX_PARTS, find_fault
from modelswarm_gateway.api.http.app import build_http_app
from modelswarm_gateway.errors import TABLE, ApiError, Code
from tools.dashboard.metric_registries import MODEL

BODY = {"model": "none", "prompt": "hi"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def make_client() -> httpx.AsyncClient:
    service, _ = make_service_with_model()
    app = build_http_app(service)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/completions", "this route has none"),
        ("GET", "/v1/models", "allowed: beta"),
        ("GET", "/v1/models/none", "allowed: beta"),
        ("GET", "/health", "this route has none"),
        ("DELETE", "/v1/sessions/a", "allowed: model"),
    ],
)
async def test_unknown_query_parameter_is_refused(method: str, path: str, allowed: str) -> None:
    answer = await make_client().request(method, f"{path}?stream=true")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "unknown_parameter",
        "stream",
    )
    assert allowed in error["message"]


async def test_query_parameter_given_twice_is_refused() -> None:
    answer = await make_client().delete("/v1/sessions/a?model=a&model=b")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize("name", REFUSED_HEADERS)
async def test_header_that_asks_for_more_is_refused(name: str) -> None:
    answer = await make_client().post("/v1/completions", json=BODY, headers={name: "1"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert REFUSED_HEADERS[name] in error["message"]


async def test_other_unknown_headers_are_ignored() -> None:
    headers = {"x-stainless-os": "Linux", "openai-organization": "o", "x-anything": "1"}
    answer = await make_client().post("/v1/completions", json=BODY, headers=headers)
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_every_response_has_its_milliseconds() -> None:
    for path in ("/health", "/nothing"):
        answer = await make_client().get(path)
        assert 0 <= int(answer.headers["openai-processing-ms"]) < 60_000


async def test_trace_of_the_caller_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = make_client()
    for parent in (f"00-{TRACE}-00f067aa0ba902b7-01", f"00-{'0' * 32}-00f067aa0ba902b7-01", "x"):
        headers = {"traceparent": parent, "x-request-id": "mine"}
        assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 404
    lines = [line for line in caplog.messages if line.startswith("request mine")]
    assert [line.startswith(f"request mine (trace {TRACE}): POST") for line in lines] == [
        True,
        False,
        False,
    ]


def test_error_says_whether_the_request_may_be_repeated() -> None:
    for code, mapping in TABLE.items():
        headers = ApiError(code, "x").headers()
        assert headers == {"x-should-retry": str(mapping.retryable).lower()}
    headers = ApiError(next(iter(TABLE)), "x", retry_after=0.25).headers()
    assert headers["retry-after"] == "1"
    assert 250 <= int(headers["retry-after-ms"]) <= 500


def test_clients_that_are_refused_together_come_back_apart() -> None:
    """OpenAI's clients wait for exactly as long as they are told."""
    refused = [ApiError(Code.NO_CAPACITY, "x", retry_after=1.0).headers() for _ in range(200)]
    waits = {int(each["retry-after-ms"]) for each in refused}
    assert len(waits) > 50
    assert min(waits) >= 1000 and max(waits) <= 1250


def place_of_fault(request: Message) -> str | None:
    fault = find_fault(request)
    return None if fault is None else fault.param


def test_unknown_protobuf_field_is_found_with_its_place() -> None:
    tag = bytes([0xF8, 0x3F, 1])  # field 1023, a varint of 1
    request = api_pb2.GenerateRequest(model="m", prompt="x")
    request.sampling.temperature = 1
    assert place_of_fault(request) is None
    raw = request.SerializeToString()
    assert place_of_fault(api_pb2.GenerateRequest.FromString(raw + tag)) == "1023"
    request.sampling.MergeFromString(tag)
    assert place_of_fault(request) == "sampling.1023"
    chat = api_pb2.Messages(messages=[api_pb2.Message(role="user", content="x")])
    chat.messages[0].MergeFromString(tag)
    request = api_pb2.GenerateRequest(model="m", chat=chat)
    assert place_of_fault(request) == "chat.messages.1023"


def test_number_of_parts_in_a_protobuf_request_is_bounded() -> None:
    """A request of 16 MiB has room for eight million: all are counted together, before one is read."""
    half = api_pb2.Message(tool_calls=[api_pb2.ToolCall()] * (MAX_PARTS // 2))
    request = api_pb2.GenerateRequest(chat=api_pb2.Messages(messages=[half]))
    assert place_of_fault(request) is None
    request.chat.messages.append(half)
    assert place_of_fault(request) == "chat.messages.tool_calls"
    texts = api_pb2.GenerateRequest(chat=api_pb2.Messages(documents=["1"] * (MAX_PARTS + 1)))
    fault = find_fault(texts)
    assert fault is not None
    assert (fault.code, fault.param) == (Code.INVALID_REQUEST, "chat.documents")
    biases = dict.fromkeys(range(MAX_PARTS + 1), 1.0)
    sampling = api_pb2.Sampling(logit_bias=biases)
    assert place_of_fault(api_pb2.GenerateRequest(sampling=sampling)) == "sampling.logit_bias"
    numbers = api_pb2.TokenIds(ids=range(MAX_PARTS + 1))
    assert place_of_fault(api_pb2.GenerateRequest(tokens=numbers)) is None


async def test_beta_of_models_needs_the_version_header() -> None:
    client, version = make_client(), {"anthropic-version": "2023-06-01"}
    for path in ("/v1/models", f"/v1/models/{MODEL}"):
        assert (await client.get(f"{path}?beta=true", headers=version)).status_code == 200
        refused = await client.get(f"{path}?beta=true")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "beta")
