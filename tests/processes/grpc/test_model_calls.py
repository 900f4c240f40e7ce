"""ListModels, Tokenize and Detokenize over gRPC say what the HTTP API says."""

from __future__ import annotations

from typing import Any

import httpx
from support.models.tokenizers import encode_bytes
from support.processes.swarm import ENDLESS, MODEL, VOCABULARY, Endpoints

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

Stub = api_pb2_grpc.InferenceStub


def post(endpoints: Endpoints, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{endpoints.url}/{path}", json={"model": MODEL} | body, timeout=60)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def chat(*texts: str, **fields: Any) -> api_pb2.Messages:
    messages = [api_pb2.Message(role="user", content=text) for text in texts]
    return api_pb2.Messages(messages=messages, **fields)


def test_models_are_listed_as_over_http(stub: Stub, endpoints: Endpoints) -> None:
    [model] = stub.ListModels(api_pb2.ListModelsRequest(), timeout=60).models
    [entry] = httpx.get(f"{endpoints.url}/v1/models", timeout=60).json()["data"]
    assert (model.id, model.created) == (entry["id"], entry["created"])
    assert (model.max_model_len, model.ready) == (entry["max_model_len"], True)
    assert (model.chat, model.chat_problem) == (True, "")
    assert model.vocab_size == entry["vocab_size"] == VOCABULARY


def test_prompt_is_tokenized_and_detokenized(stub: Stub) -> None:
    request = api_pb2.TokenizeRequest(model=MODEL, prompt="tell me", return_token_strs=True)
    made = stub.Tokenize(request, timeout=60)
    assert list(made.tokens) == encode_bytes("tell me")
    assert (made.count, made.max_model_len) == (7, ENDLESS)
    assert made.token_strs[0] == "t"
    asked = api_pb2.DetokenizeRequest(model=MODEL, tokens=made.tokens)
    assert stub.Detokenize(asked, timeout=60).prompt == "tell me"


def test_chat_is_tokenized_as_over_http(stub: Stub, endpoints: Endpoints) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for flag in (True, False):
        by_http = post(endpoints, "tokenize", messages=messages, add_generation_prompt=flag)
        given = chat("hi", add_generation_prompt=flag)
        by_grpc = stub.Tokenize(api_pb2.TokenizeRequest(model=MODEL, chat=given), timeout=60)
        assert list(by_grpc.tokens) == by_http["tokens"]
        asked = api_pb2.GenerateRequest(model=MODEL, chat=given, max_tokens=1)
        assert stub.Generate(asked, timeout=60).usage.prompt_tokens == len(by_http["tokens"])
