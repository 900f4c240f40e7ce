"""Real answers of a real swarm, whole and streamed, and real errors, validated against the served OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema
import pytest
from support.processes.swarm import MODEL, two_spans

HI = [{"role": "user", "content": "hi"}]
ALL: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 5,
    "ignore_eos": True,
    "return_token_ids": True,
}
CHAT: dict[str, Any] = ALL | {"messages": HI, "logprobs": True, "top_logprobs": 2}
TEXT: dict[str, Any] = ALL | {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True}
USAGE: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
STREAM: dict[str, Any] = {"stream": True, "stream_options": USAGE}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 5}
MESSAGES: dict[str, Any] = {"model": MODEL, "messages": HI}
Request = tuple[str, str, dict[str, Any] | None]
ANSWERED: list[Request] = [
    ("POST", "/v1/chat/completions", CHAT | {"prompt_logprobs": 1}),
    ("POST", "/v1/chat/completions", {"model": MODEL, "messages": HI, "max_tokens": 0}),
    ("POST", "/v1/chat/completions", CHAT | STREAM),
    ("POST", "/v1/completions", TEXT | {"prompt_logprobs": 1}),
    ("POST", "/v1/completions", TEXT | STREAM),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "x", "session_id": "s", "stream": True}),
    ("POST", "/tokenize", {"model": MODEL, "prompt": "x", "return_token_strs": True}),
    ("POST", "/tokenize", {"model": MODEL, "messages": HI}),
    ("POST", "/detokenize", {"model": MODEL, "tokens": [70]}),
    ("GET", "/v1/models", None),
    ("GET", f"/v1/models/{MODEL}", None),
    ("POST", "/v1/sessions", {"model": MODEL, "session_id": "open", "max_length": 20}),
    ("GET", "/v1/sessions/open", None),
    ("POST", "/v1/sessions/s/fork", {"session_id": "forked"}),
    ("DELETE", "/v1/sessions/open", None),
    ("POST", "/v1/responses", RESPONSE | {"stream": True}),
    ("POST", "/v1/responses", RESPONSE),
    ("GET", "/v1/responses/{id}", None),
    ("GET", "/v1/responses/{id}/input_items", None),
    ("DELETE", "/v1/responses/{id}", None),
    ("POST", "/v1/messages", MESSAGES | {"max_tokens": 5}),
    ("POST", "/v1/messages", MESSAGES | {"max_tokens": 5, "stream": True}),
    ("POST", "/v1/messages/count_tokens", MESSAGES),
    ("GET", "/health", None),
    ("GET", "/live", None),
    ("GET", "/ready", None),
    ("GET", "/version", None),
    ("GET", "/openapi.json", None),
    ("HEAD", "/ready", None),
]
REFUSED: list[Request] = [
    ("POST", "/v1/chat/completions", CHAT | {"model": "none"}),
    ("POST", "/v1/chat/completions", CHAT | {"priority": 1}),
    ("POST", "/v1/completions", TEXT | {"prompt": "x" * 5000}),
    (
        "POST",
        "/v1/completions",
        {"model": MODEL, "prompt": "x", "session_id": "no", "append": True},
    ),
    ("POST", "/detokenize", {"model": MODEL, "tokens": [10**6]}),
    ("POST", "/v1/sessions", {"model": MODEL, "max_length": 1}),
    ("GET", "/v1/models/none", None),
    ("GET", "/v1/models?x=1", None),
    ("GET", "/v1/sessions/none", None),
    ("DELETE", "/v1/sessions/none", None),
    ("GET", "/v1/sessions/none?model=none", None),
    ("DELETE", "/v1/sessions/none?model=none", None),
]


@dataclass(slots=True)
class Api:
    client: httpx.Client
    document: dict[str, Any]
    seen: set[tuple[str, str]] = field(default_factory=set)
    last_id: str = ""  # of what the last POST has made

    def operation(self, method: str, path: str) -> dict[str, Any]:
        """Return the operation of a real path."""
        paths: dict[str, Any] = self.document["paths"]
        name = min(self.templates(path), key=lambda each: each.count("{"))
        self.seen.add((method, name))
        found: dict[str, Any] = paths[name][method.lower()]
        return found

    def templates(self, path: str) -> list[str]:
        """Return the documented paths that a real path may be one of."""
        real = path.partition("?")[0]
        paths = self.document["paths"]
        return [name for name in paths if re.fullmatch(re.sub("{[^}]*}", "[^/]+", name), real)]

    def check(self, schema: dict[str, Any], value: object) -> None:
        whole = schema | {"components": self.document["components"]}
        jsonschema.Draft202012Validator(whole).validate(value)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with (
        two_spans(tmp_path_factory.mktemp("openapi")) as swarm,
        httpx.Client(base_url=swarm.gateway().url, timeout=60) as client,
    ):
        yield Api(client, client.get("/openapi.json").json())


def validate(api: Api, request: Request) -> int:
    """Send a request, and validate it and its answer; return the status."""
    method, path, body = request
    path = path.replace("{id}", api.last_id)
    operation = api.operation(method, path)
    answer = api.client.request(method, path, json=body)
    response = operation["responses"][str(answer.status_code)]
    assert set(response["headers"]) & {"x-request-id"} <= answer.headers.keys()
    kind = answer.headers["content-type"].partition(";")[0]
    if method == "HEAD":
        assert "content" not in response and not answer.content
    elif kind == "text/event-stream":
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        for line in lines:
            if line == "[DONE]":
                continue
            api.check(response["content"][kind]["x-event-schema"], json.loads(line))
    else:
        api.check(response["content"][kind]["schema"], answer.json())
        api.last_id = answer.json().get("id", "") if method == "POST" else api.last_id
    if answer.is_error:
        assert answer.json()["error"]["code"] in response["description"]
    elif body is not None:
        api.check(operation["requestBody"]["content"]["application/json"]["schema"], body)
    return answer.status_code


def test_every_answer_has_the_documented_form(api: Api) -> None:
    for request in ANSWERED:
        if not api.templates(request[1]):
            continue
        assert validate(api, request) == 200, request
    every = {
        (method.upper(), path)
        for path, operations in api.document["paths"].items()
        for method in operations
        if method != "head"
    }
    assert every <= api.seen, "send a request to every operation"


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/models", 200), (f"/v1/models/{MODEL}", 200), ("/v1/models/x", 404)]
)
def test_models_have_the_documented_form_of_anthropic(api: Api, path: str, status: int) -> None:
    answer = api.client.get(path, headers={"anthropic-version": "2023-06-01"})
    operation = api.operation("GET", path)
    assert answer.status_code == status
    response = operation["responses"][str(status)]
    api.check(response["content"]["application/json"]["schema"], answer.json())
    assert answer.json().keys() & {"type", "has_more"}


@pytest.mark.parametrize("request_", REFUSED)
def test_every_refusal_has_the_documented_form(api: Api, request_: Request) -> None:
    assert validate(api, request_) >= 400
