"""google.rpc's error details: each refusal has the sentence and the code of the HTTP API, with the field's name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.processes.swarm import ENDLESS, MODEL, Endpoints

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

Stub = api_pb2_grpc.InferenceStub
BIG = 10 * ENDLESS


@dataclass(frozen=True, slots=True)
class Details:
    """The error details of one call."""

    status: grpc.StatusCode
    message: str
    code: str
    param: str | None
    violations: dict[str, str] = field(default_factory=dict)  # field -> sentence
    retry_seconds: float | None = None


def read_details(error: Any) -> Details:
    """Return the details of a failed call as grpcio-status reads them."""
    status = rpc_status.from_call(error)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    violations, retry_seconds = {}, None
    for packed in status.details:
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if packed.Unpack(bad):
            violations = {each.field: each.description for each in bad.field_violations}
        elif packed.Unpack(retry):
            retry_seconds = retry.retry_delay.ToMilliseconds() / 1000
        else:
            assert packed.Unpack(info)
    assert info.domain == "modelswarm.io"
    assert info.reason == info.metadata["code"].upper()
    param = info.metadata.get("param")
    found = error.code(), status.message, info.metadata["code"], param
    return Details(*found, violations, retry_seconds)


def refusal(call: Callable[[], object]) -> Details:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return read_details(refused.value)


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": api_pb2.Sampling(**fields)}


def user(text: str | None, role: str = "user") -> dict[str, Any]:
    return {"chat": api_pb2.Messages(messages=[api_pb2.Message(role=role, content=text)])}


# Fields of `POST /v1/completions` or `/v1/chat/completions`, and those of GenerateRequest that ask the same.
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model": None}, {"model": ""}),
    ({"model": "gpt-9"}, {"model": "gpt-9"}),
    ({"prompt": ""}, {"prompt": ""}),
    ({"prompt": "x" * BIG}, {"prompt": "x" * BIG}),
    ({"stop": [""]}, {"stop": [""]}),
    ({"stop": ["a"] * 17}, {"stop": ["a"] * 17}),
    ({"temperature": -1}, sampling(temperature=-1)),
    ({"temperature": 2.5}, sampling(temperature=2.5)),
    ({"top_k": -2}, sampling(top_k=-2)),
    ({"logit_bias": {"5": 101}}, sampling(logit_bias={5: 101})),
    ({"logit_bias": {"99999": 1}}, sampling(logit_bias={99999: 1})),
    ({"bad_words": [""]}, sampling(bad_words=[""])),
    ({"stop_token_ids": [99999]}, sampling(stop_token_ids=[99999])),
    ({"session_id": "x" * 257}, {"session_id": "x" * 257}),
    ({"append": True}, {"append": True}),
    ({"session_position": 3}, {"session_position": 3}),
    ({"session_id": "gone", "append": True}, {"session_id": "gone", "append": True}),
    ({"messages": []}, {"chat": api_pb2.Messages()}),
    ({"messages": [{"role": "robot", "content": "x"}]}, user("x", "robot")),
    ({"messages": [{"role": "user"}]}, user(None)),
    ({"messages": [{"role": "tool", "content": "x"}]}, user("x", "tool")),
]


def by_http(endpoints: Endpoints, fields: dict[str, Any]) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 5, **fields}
    body |= {} if "messages" in fields else {"prompt": fields.get("prompt", "a")}
    path = "chat/completions" if "messages" in fields else "completions"
    answer = httpx.post(f"{endpoints.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code >= 400, fields
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(
    ("http", "fields"), PAIRS, ids=[str(number) for number in range(len(PAIRS))]
)
def test_refusal_has_the_code_and_sentence_of_http(
    stub: Stub, endpoints: Endpoints, http: dict[str, Any], fields: dict[str, Any]
) -> None:
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 5} | fields
    request |= {} if "chat" in fields else {"prompt": fields.get("prompt", "a")}
    asked = api_pb2.GenerateRequest(**request)
    found = refusal(lambda: stub.Generate(asked, timeout=60))
    expected = by_http(endpoints, http)
    assert found.code == expected["code"]
    place = found.param or ""
    assert place.endswith(expected["param"])
    prefix = place.removesuffix(expected["param"])
    assert prefix in ("", "sampling.", "chat.")
    own = expected["message"]
    first = re.split(r"[.\[]", expected["param"])[0]
    assert found.message == (prefix + own if own.startswith(first) else own)
    if found.status is grpc.StatusCode.INVALID_ARGUMENT:
        assert found.violations == {place: found.message}
        assert found.retry_seconds is None


def test_unary_calls_have_details_too(stub: Stub) -> None:
    for call in (
        lambda: stub.Tokenize(api_pb2.TokenizeRequest(model=MODEL), timeout=60),
        lambda: stub.Detokenize(api_pb2.DetokenizeRequest(tokens=[1]), timeout=60),
        lambda: stub.Detokenize(api_pb2.DetokenizeRequest(model=MODEL, tokens=[99999]), timeout=60),
        lambda: stub.Tokenize(
            api_pb2.TokenizeRequest(model=MODEL, add_special_tokens=True, **user("x")), timeout=60
        ),
    ):
        found = refusal(call)
        assert found.status is grpc.StatusCode.INVALID_ARGUMENT
        assert list(found.violations) == [found.param]
        assert found.message.startswith(f"{found.param}")
    unknown = refusal(
        lambda: stub.Tokenize(api_pb2.TokenizeRequest(model="other", prompt="x"), timeout=60)
    )
    assert (unknown.status, unknown.code) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
    assert (unknown.param, unknown.violations) == ("model", {})


def test_variables_that_are_no_json_name_their_field(stub: Stub) -> None:
    chat = user("x")["chat"]
    chat.chat_template_kwargs = "{"
    found = refusal(lambda: stub.Generate(api_pb2.GenerateRequest(model=MODEL, chat=chat)))
    assert found.param == "chat.chat_template_kwargs"
    assert found.message.startswith("chat.chat_template_kwargs: is not JSON:")


def test_no_capacity_says_when_to_retry(stub: Stub) -> None:
    """The pages suffice for ten sessions of the whole context; these streams are not read."""
    asked = api_pb2.GenerateRequest(
        model=MODEL, prompt="a", max_tokens=ENDLESS - 10, ignore_eos=True
    )
    running: list[Any] = []
    try:
        found = None
        while found is None and len(running) < 20:
            stream: Any = stub.GenerateStream(asked)
            try:
                next(stream)
                running.append(stream)
            except grpc.RpcError as error:
                found = read_details(error)
        assert found is not None
        assert found.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert found.code == "no_capacity"
        assert found.retry_seconds is not None and found.retry_seconds > 0
    finally:
        for stream in running:
            stream.cancel()
