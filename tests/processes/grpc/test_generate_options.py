"""Generate over gRPC: log probabilities, echo, several answers and structured output, as the HTTP API has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from support.models.tokenizers import encode_bytes
from support.processes.swarm import (
    BLOCKS,
    ENDLESS,
    MODEL,
    VOCABULARY,
    Endpoints,
    HashSwarm,
    two_spans,
)

from modelswarm.protocol.messages import Sampling
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.api.http.logprobs_json import token_text
from modelswarm_serving.model.hash_model import reference_tokens

Stub = api_pb2_grpc.InferenceStub


def request(**fields: Any) -> api_pb2.GenerateRequest:
    known = {"model": MODEL, "prompt": "go", "max_tokens": 40, "ignore_eos": True}
    return api_pb2.GenerateRequest(**{**known, **fields})


def complete(endpoints: Endpoints, **fields: Any) -> dict[str, Any]:
    known = {"model": MODEL, "prompt": "go", "max_tokens": 40, "ignore_eos": True}
    known["return_token_ids"] = True
    answer = httpx.post(f"{endpoints.url}/v1/completions", json=known | fields, timeout=60)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def expected(choice: int, count: int) -> list[int]:
    prompt = encode_bytes("go")
    sampling = Sampling(temperature=1.0, seed=7, choice=choice)
    end = len(prompt) + count
    return reference_tokens(prompt, sampling, count, end, n_blocks=BLOCKS, vocabulary=VOCABULARY)


def refused_field(stub: Stub, **fields: Any) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        stub.Generate(request(**fields), timeout=60)
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
    return str(dict(error.trailing_metadata())["error-param"])


@pytest.mark.parametrize("echo", [False, True])
def test_log_probabilities_are_those_of_http(stub: Stub, endpoints: Endpoints, echo: bool) -> None:
    choice = complete(endpoints, logprobs=2, echo=echo)["choices"][0]
    whole = stub.Generate(request(logprobs=2, echo=echo), timeout=60)
    parts = list(stub.GenerateStream(request(logprobs=2, echo=echo), timeout=60))
    assert whole.text == "".join(part.text for part in parts) == choice["text"]
    entries = list(whole.logprobs)
    assert entries == [entry for part in parts for entry in part.logprobs]
    assert len(entries) == 40 + (2 if echo else 0)
    found = choice["logprobs"]
    values = [entry.logprob if entry.HasField("logprob") else None for entry in entries]
    assert values == found["token_logprobs"]
    assert [entry.text_offset for entry in entries] == found["text_offset"]
    assert [entry.HasField("logprob") for entry in entries[:2]] == [not echo, True]
    for entry in entries:
        if entry.HasField("logprob"):
            assert [top.logprob for top in entry.top] == sorted(
                (top.logprob for top in entry.top), reverse=True
            )
            assert len(entry.top) == 2
    generated = entries[2:] if echo else entries
    assert [entry.token_id for entry in generated] == list(whole.token_ids) == choice["token_ids"]
    bytes_of = {entry.token_id: entry.token for entry in entries}
    shown = [token_text(entry.token_id, bytes_of.__getitem__) for entry in entries]
    assert shown == found["tokens"]


def test_no_log_probabilities_unless_they_are_asked_for(stub: Stub) -> None:
    assert not stub.Generate(request(), timeout=60).logprobs
    bare = stub.Generate(request(logprobs=0), timeout=60)
    assert len(bare.logprobs) == 40
    assert not any(entry.top for entry in bare.logprobs)


def test_log_probabilities_of_a_prompt_are_those_of_http(stub: Stub, endpoints: Endpoints) -> None:
    given = complete(endpoints, prompt="tell me", prompt_logprobs=2)["choices"][0]
    asked = request(prompt="tell me", prompt_logprobs=2)
    entries = list(stub.Generate(asked, timeout=60).prompt_logprobs)
    assert [entry.token_id for entry in entries] == encode_bytes("tell me")
    assert not entries[0].HasField("logprob")
    for entry, scores in zip(entries[1:], given["prompt_logprobs"][1:], strict=True):
        assert entry.logprob == scores[str(entry.token_id)]["logprob"]
        assert len(entry.top) == 2
        for top in entry.top:
            assert top.logprob == scores[str(top.token_id)]["logprob"]
    parts = list(stub.GenerateStream(asked, timeout=60))
    assert list(parts[0].prompt_logprobs) == entries
    assert not any(part.prompt_logprobs for part in parts[1:])


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("go", {"skip_special_tokens": False}),  # the answer has some
        ("tell me more", {"truncate_prompt_tokens": 3}),
        ("tell me more", {"truncate_prompt_tokens": 3, "truncation_side": "right"}),
    ],
)
def test_options_of_text_are_those_of_http(
    stub: Stub, endpoints: Endpoints, text: str, fields: dict[str, Any]
) -> None:
    choice = complete(endpoints, prompt=text, **fields)["choices"][0]
    whole = stub.Generate(request(prompt=text, **fields), timeout=60)
    assert (whole.text, list(whole.token_ids)) == (choice["text"], choice["token_ids"])
    bare = stub.Generate(request(prompt=text), timeout=60)
    assert whole.text != bare.text


def test_stop_string_is_shown_if_wanted(stub: Stub) -> None:
    text = stub.Generate(request(), timeout=60).text
    stop = text[10:12]
    shown = stub.Generate(request(stop=[stop], include_stop_str_in_output=True), timeout=60)
    assert shown.text == text[: text.index(stop) + len(stop)]


def test_prompt_token_ids_come_once(stub: Stub) -> None:
    asked = request(return_prompt_token_ids=True)
    assert list(stub.Generate(asked, timeout=60).prompt_token_ids) == encode_bytes("go")
    parts = list(stub.GenerateStream(asked, timeout=60))
    assert list(parts[0].prompt_token_ids) == encode_bytes("go")
    assert not any(part.prompt_token_ids for part in parts[1:])


def test_answers_have_indexes_and_one_usage(stub: Stub) -> None:
    sampling = api_pb2.Sampling(temperature=1.0, seed=7)
    asked = request(n=4, sampling=sampling, max_tokens=60)
    whole = stub.Generate(asked, timeout=60)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [list(choice.token_ids) for choice in whole.choices] == [
        expected(choice, 60) for choice in range(4)
    ]
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    assert (whole.text, list(whole.token_ids)) == ("", [])
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 240)

    got: list[list[int]] = [[], [], [], []]
    parts = list(stub.GenerateStream(asked, timeout=60))
    for part in parts:
        got[part.index] += part.token_ids
    assert got == [list(choice.token_ids) for choice in whole.choices]
    assert sorted(part.index for part in parts if part.finish_reason) == [0, 1, 2, 3]
    assert [part.HasField("usage") for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].usage == whole.usage
    assert len({part.id for part in parts}) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "up"}, "truncation_side"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "session_id": "x"}, "n"),
        (
            {"prompt": None, "tokens": {"ids": [5]}, "add_special_tokens": True},
            "add_special_tokens",
        ),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "grammar": "start: /a/"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"type": "strnig"}'}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "["}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_wrong_option_is_refused_by_name(stub: Stub, fields: dict[str, Any], param: str) -> None:
    assert refused_field(stub, **{"ignore_eos": False, **fields}) == param


def test_grammar_with_ignore_eos_is_refused(stub: Stub) -> None:
    assert refused_field(stub, structured_outputs={"regex": "a"}) == "ignore_eos"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("grpc-kills"), context=ENDLESS) as made:
        yield made


@pytest.mark.full
def test_answers_with_logprobs_survive_a_kill_of_the_tail(own: HashSwarm) -> None:
    count = 1500
    asked = request(
        n=3, logprobs=1, max_tokens=count, sampling=api_pb2.Sampling(temperature=1.0, seed=7)
    )
    got: list[list[int]] = [[], [], []]
    scored: list[list[int]] = [[], [], []]
    with grpc.insecure_channel(own.gateway().grpc) as channel:
        for number, part in enumerate(Stub(channel).GenerateStream(asked, timeout=120)):
            got[part.index] += part.token_ids
            scored[part.index] += [entry.token_id for entry in part.logprobs]
            if number == 200:
                own.kill("s1")
                own.server("s2", "2:4")
    assert got == [expected(choice, count) for choice in range(3)]
    assert scored == got
