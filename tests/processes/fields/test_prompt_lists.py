"""A list of prompts over HTTP: each is a session of its own; indexes, usage, refusals, and the loss of a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest
from support.models.tokenizers import encode_bytes
from support.processes.http_requests import lines
from support.processes.swarm import (
    BLOCKS,
    ENDLESS,
    MODEL,
    VOCABULARY,
    Endpoints,
    HashSwarm,
)

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.hash_model import reference_tokens

PROMPTS = ["go", "stay here", "x"]
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": PROMPTS,
    "max_tokens": 40,
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 7,
    "return_token_ids": True,
}


def post(gateway: Endpoints, **fields: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/completions", json=BODY | fields, timeout=60)


def expected(text: str, count: int, choice: int = 0) -> list[int]:
    prompt = encode_bytes(text)
    sampling = Sampling(temperature=1.0, seed=7, choice=choice)
    end = len(prompt) + count
    return reference_tokens(prompt, sampling, count, end, n_blocks=BLOCKS, vocabulary=VOCABULARY)


def choices_of(stream: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in stream:
        if line.startswith("data: {"):
            yield from json.loads(line.removeprefix("data: "))["choices"]


def test_every_prompt_has_its_answer_and_tokens(gateway: Endpoints) -> None:
    body = post(gateway).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for text, choice in zip(PROMPTS, body["choices"], strict=True):
        assert choice["token_ids"] == expected(text, 40)
        assert choice["prompt_token_ids"] == encode_bytes(text)
    prompt = sum(map(len, PROMPTS))
    usage = {"prompt_tokens": prompt, "completion_tokens": 120, "total_tokens": prompt + 120}
    assert body["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_indexes_count_the_answers_of_each_prompt(gateway: Endpoints) -> None:
    body = post(gateway, prompt=[encode_bytes(text) for text in PROMPTS], n=2).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["token_ids"] for choice in body["choices"]] == [
        expected(text, 40, choice) for text in PROMPTS for choice in range(2)
    ]
    assert body["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))


def test_echo_and_logprobs_are_those_of_each_prompt(gateway: Endpoints) -> None:
    body = post(gateway, echo=True, logprobs=1, prompt_logprobs=0, max_tokens=2, n=2).json()
    prompts = [text for text in PROMPTS for _ in range(2)]
    scored: dict[str, list[float | None]] = {}
    for text, choice in zip(prompts, body["choices"], strict=True):
        assert choice["text"].startswith(text)
        found = choice["logprobs"]
        assert "".join(found["tokens"][: len(text)]) == text
        assert len(found["token_logprobs"]) == len(text) + 2
        assert len(choice["prompt_logprobs"]) == len(text)
        scores = found["token_logprobs"][: len(text)]
        assert scored.setdefault(text, scores) == scores
        assert all(score is not None for score in scores[1:])


def test_the_openai_client_streams_answers_to_a_list(gateway: Endpoints) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 20, "seed": 5}
        whole = client.completions.create(**fields)
        options: Any = {"include_usage": True}
        chunks = list(client.completions.create(**fields, stream=True, stream_options=options))
    texts, finished = ["", "", ""], []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
        finished += [choice.index] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert sorted(finished) == [0, 1, 2]
    assert chunks[-1].usage == whole.usage


@pytest.mark.full
def test_answers_to_a_list_survive_a_kill_of_the_tail(swarm: HashSwarm, gateway: Endpoints) -> None:
    count = 1500
    got: list[list[int]] = [[], [], []]
    prompts: dict[int, list[int]] = {}
    with closing(lines(gateway, BODY | {"max_tokens": count})) as stream:
        for events, choice in enumerate(choices_of(stream)):
            got[choice["index"]] += choice.get("token_ids", [])
            if "prompt_token_ids" in choice:
                prompts[choice["index"]] = choice["prompt_token_ids"]
            if events == 200:
                swarm.kill("s1")
                swarm.server("s2", "2:4")
    assert got == [expected(text, count) for text in PROMPTS]
    assert prompts == {place: encode_bytes(text) for place, text in enumerate(PROMPTS)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": "x"}, "prompt"),
        ({"n": 128, "prompt": ["x"] * 9}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt[1]"),
        ({"prompt": [[9], [9, VOCABULARY]]}, "prompt[1]"),
        ({"prompt": ["x", "y" * ENDLESS * 2]}, "prompt[1]"),
    ],
)
def test_wrong_list_is_refused_by_name(
    gateway: Endpoints, fields: dict[str, Any], param: str
) -> None:
    answer = post(gateway, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert post(gateway, max_tokens=1).status_code == 200


def test_list_without_room_is_refused_as_a_whole(gateway: Endpoints) -> None:
    """Pages suffice for ten sessions of the whole context."""
    answer = post(gateway, prompt=["x"] * 12, max_tokens=ENDLESS - 10)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "no_capacity")
    assert post(gateway).status_code == 200, "the granted pages were given back"
