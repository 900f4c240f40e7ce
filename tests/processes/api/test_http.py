"""The HTTP API of a real gateway over real server processes: requests and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.eventually import eventually
from support.models.tokenizers import BEGIN, END, byte_level, encode_bytes
from support.processes.swarm import CONTEXT, MODEL, Endpoints, HashSwarm, two_spans

from modelswarm_gateway.generation.resumption import parse_event_id

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("http")) as made:
        yield made


@pytest.fixture(scope="module")
def endpoints(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway()


@pytest.fixture
def client(endpoints: Endpoints) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=endpoints.url, timeout=30) as made:
        yield made


def completion(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "tell me", "ignore_eos": True, "return_token_ids": True}
    answer = client.post("/v1/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all events of a stream after checking its end mark, which is left out."""
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def usage_of(prompt: int, completion: int) -> dict[str, Any]:
    """Return the usage of an answer without a session, whose prompt no server had."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    return counts | {"total_tokens": prompt + completion} | details


def test_a_chat_is_answered_whole_with_usage(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": HI, "max_tokens": 7, "ignore_eos": True},
    )
    body = answer.json()
    assert answer.headers["x-request-id"].startswith("req_")
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert body["usage"] == usage_of(6, 7)


def test_streamed_chat_equals_the_whole_answer(client: httpx.Client) -> None:
    body = {"model": MODEL, "messages": HI, "max_tokens": 40, "ignore_eos": True}
    whole = client.post("/v1/chat/completions", json=body).json()
    chunks = events(client, "/v1/chat/completions", body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert [event["choices"][0]["finish_reason"] for event in chunks[:-1]] == [None] * (
        len(chunks) - 1
    )
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert {event["id"] for event in chunks} == {chunks[0]["id"]}
    assert all("usage" not in event for event in chunks)


def test_a_stream_gives_usage_only_when_asked(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 5, "ignore_eos": True}
    chunks = events(client, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage_of(2, 5)
    assert all(event["usage"] is None for event in chunks[:-1])


def test_tokens_come_once_in_order_and_match_the_text(client: httpx.Client) -> None:
    whole = completion(client, max_tokens=300)
    tokens = whole["choices"][0]["token_ids"]
    body = {"model": MODEL, "prompt": "tell me", "ignore_eos": True, "max_tokens": 300}
    chunks = events(client, "/v1/completions", body | {"return_token_ids": True})
    streamed = [t for event in chunks for t in event["choices"][0].get("token_ids", [])]
    assert len(tokens) == 300
    assert streamed == tokens
    text = "".join(event["choices"][0]["text"] for event in chunks)
    assert text == whole["choices"][0]["text"] == byte_level().decode(tokens)
    assert whole["choices"][0]["prompt_token_ids"] == encode_bytes("tell me")


def test_stream_ids_are_positions_of_the_log(client: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "prompt": "tell me",
        "ignore_eos": True,
        "max_tokens": 50,
        "stream": True,
    }
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert not any(line.startswith("id: ") for line in answer.iter_lines())
    body["session_id"] = "positions"
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("id: ")]
    ids = [parse_event_id(line[4:])[0] for line in lines]
    assert ids == sorted(set(ids))
    assert len("tell me") <= ids[0]
    assert ids[-1] == len("tell me") + 50 - 1


def test_a_stop_string_cuts_the_text_and_ends_the_turn(client: httpx.Client) -> None:
    text = completion(client, max_tokens=60)["choices"][0]["text"]
    stop = text[20:23]
    cut = text.index(stop)
    for stops in (stop, ["never there", stop]):
        [choice] = completion(client, max_tokens=60, stop=stops)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[:cut], "stop")
    body = {"model": MODEL, "prompt": "tell me", "ignore_eos": True, "max_tokens": 60, "stop": stop}
    chunks = events(client, "/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in chunks) == text[:cut]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_end_token_ends_the_text_and_is_not_shown(client: httpx.Client) -> None:
    for length in range(1, 40):
        body = {"model": MODEL, "prompt": "x" * length, "max_tokens": 200, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body).json()
        [choice] = answer["choices"]
        if choice["finish_reason"] == "stop":
            assert choice["token_ids"][-1] == END
            assert choice["text"] == byte_level().decode(choice["token_ids"])
            assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) < 200
            return
    pytest.fail("the hash model never drew the end token")


def test_zero_tokens_only_read_the_prompt(client: httpx.Client) -> None:
    answer = completion(client, max_tokens=0)
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    body = {"model": MODEL, "messages": HI, "max_tokens": 0}
    chunks = events(client, "/v1/chat/completions", body)
    assert [event["choices"][0]["finish_reason"] for event in chunks] == [None, "length"] or [
        event["choices"][0]["finish_reason"] for event in chunks
    ] == ["length"]


def test_text_completion_has_sixteen_tokens_by_default(client: httpx.Client) -> None:
    assert completion(client)["usage"]["completion_tokens"] == 16


def test_token_prompts_are_taken_as_they_are(client: httpx.Client) -> None:
    by_text = completion(client, prompt="abc", max_tokens=8)
    for prompt in (encode_bytes("abc"), [encode_bytes("abc")], ["abc"]):
        assert completion(client, prompt=prompt, max_tokens=8)["choices"] == by_text["choices"]
    assert completion(client, prompt=[BEGIN], max_tokens=1)["usage"]["prompt_tokens"] == 1


def test_text_is_determined_by_the_seed(client: httpx.Client) -> None:
    def text(**fields: Any) -> str:
        answer: str = completion(client, max_tokens=30, **fields)["choices"][0]["text"]
        return answer

    assert text() == text(temperature=0)
    assert text(temperature=1, seed=5) == text(temperature=1, seed=5)
    assert text(temperature=1) != text(temperature=1)


def test_named_session_continues_its_log(client: httpx.Client) -> None:
    first = completion(client, prompt="once upon", max_tokens=20, session_id="story")
    log = encode_bytes("once upon") + first["choices"][0]["token_ids"]
    more = [*log, *encode_bytes(" and then")]
    kept = completion(client, prompt=more, max_tokens=20, session_id="story")
    fresh = completion(client, prompt=more, max_tokens=20)
    assert kept["choices"] == fresh["choices"]
    back = completion(client, prompt=log[:12], max_tokens=20, session_id="story")
    assert back["choices"] == completion(client, prompt=log[:12], max_tokens=20)["choices"]


def test_a_named_session_answers_one_request_at_a_time(
    client: httpx.Client, endpoints: Endpoints
) -> None:
    body = {
        "model": MODEL,
        "prompt": "x",
        "max_tokens": 400,
        "ignore_eos": True,
        "session_id": "one",
    }
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        next(answer.iter_lines())
        second = httpx.post(f"{endpoints.url}/v1/completions", json=body, timeout=60)
        assert second.status_code in (200, 409)
        if second.status_code == 409:
            assert second.json()["error"]["code"] == "session_busy"


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("chat/completions", {"messages": HI}, 400, "invalid_request", "model"),
        ("chat/completions", {"model": MODEL}, 400, "invalid_request", "messages"),
        ("chat/completions", {"model": "gpt-9", "messages": HI}, 404, "model_not_found", "model"),
        (
            "completions",
            {"model": MODEL, "prompt": "x", "max_tokens": -1},
            400,
            "invalid_request",
            "max_tokens",
        ),
        (
            "completions",
            {"model": MODEL, "prompt": "x", "best_of": 3},
            400,
            "unsupported_parameter",
            "best_of",
        ),
        ("completions", {"model": MODEL, "prompt": ""}, 400, "invalid_request", "prompt"),
        ("completions", {"model": MODEL, "prompt": [999_999]}, 400, "invalid_request", "prompt"),
        (
            "completions",
            {"model": MODEL, "prompt": "x" * CONTEXT},
            400,
            "context_length_exceeded",
            "prompt",
        ),
        (
            "chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": "x" * CONTEXT}]},
            400,
            "context_length_exceeded",
            "messages",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_get_openais_envelope(
    client: httpx.Client,
    path: str,
    body: dict[str, Any],
    status: int,
    code: str,
    param: str,
    stream: bool,
) -> None:
    answer = client.post(f"/v1/{path}", json=body | {"stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": "\xff"}', b"[]", b'"x"'])
def test_bodies_that_are_no_json_objects_get_400(client: httpx.Client, content: bytes) -> None:
    answer = client.post("/v1/chat/completions", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"


def test_a_body_that_is_too_large_gets_413(client: httpx.Client, endpoints: Endpoints) -> None:
    big = b" " * ((16 << 20) + 1)
    assert client.post("/v1/completions", content=big).status_code == 413
    chunks = (b" " * (1 << 20) for _ in range(18))
    try:
        answer = httpx.post(f"{endpoints.url}/v1/completions", content=chunks, timeout=30)
    except (httpx.WriteError, httpx.ReadError):
        return  # the gateway closed the connection before the end of the body
    assert answer.status_code == 413


def test_unknown_paths_and_methods_get_the_envelope_too(client: httpx.Client) -> None:
    assert client.get("/v1/nothing").json()["error"]["code"] == "not_found"
    answer = client.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_models_are_listed_and_found(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    one = client.get(f"/v1/models/{MODEL}").json()
    assert (one["object"], one["max_model_len"]) == ("model", CONTEXT)
    answer = client.get("/v1/models/a/b")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_health_and_readiness(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    head = client.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    ready = client.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["models"][0]["missing_blocks"] == []


def test_request_id_of_the_client_is_logged(client: httpx.Client, swarm: HashSwarm) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 2, "stream": True}
    answer = client.post("/v1/completions", json=body, headers={"x-request-id": "trace-17"})
    assert answer.headers["x-request-id"] == "trace-17"
    line = "request trace-17: POST /v1/completions: 200 ok after "
    eventually("it is logged", lambda: line in swarm.log("gateway"))


def test_the_openai_client_works_whole_and_streamed(endpoints: Endpoints) -> None:
    with openai.OpenAI(base_url=f"{endpoints.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        whole = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=12,
            extra_body={"ignore_eos": True},
        )
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None and whole.usage is not None
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == 18
        plain = client.completions.create(model=MODEL, prompt="x", max_tokens=3)
        assert plain.usage is not None and plain.usage.completion_tokens <= 3


def test_the_openai_client_raises_its_own_errors(endpoints: Endpoints) -> None:
    with openai.OpenAI(base_url=f"{endpoints.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-9", prompt="x")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        assert missing.value.request_id
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model=MODEL, prompt="x", max_tokens=-1)
        assert bad.value.param == "max_tokens"


def test_the_metrics_count_what_happened(endpoints: Endpoints, client: httpx.Client) -> None:
    def requests(model: str, code: str) -> float:
        return endpoints.metric("modelswarm_gateway_requests_total", model=model, code=code)

    before = requests(MODEL, "200"), requests("other", "404")
    tokens = endpoints.metric("modelswarm_gateway_tokens_total", model=MODEL, kind="generated")
    completion(client, max_tokens=10)
    client.post("/v1/completions", json={"model": "x" * 50, "prompt": "x"})
    assert (requests(MODEL, "200"), requests("other", "404")) == (before[0] + 1, before[1] + 1)
    now = endpoints.metric("modelswarm_gateway_tokens_total", model=MODEL, kind="generated")
    assert now == tokens + 10
    assert endpoints.metric("modelswarm_gateway_time_to_first_token_seconds_count", model=MODEL) > 0
    assert endpoints.metric("modelswarm_gateway_inter_token_seconds_count", model=MODEL) > 0
    assert endpoints.metric("modelswarm_gateway_servers", model=MODEL) == 2
    assert "x" * 50 not in httpx.get(f"http://{endpoints.metrics}/metrics").text
