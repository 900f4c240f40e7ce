"""`n` above 1 over HTTP: indexes, noise of their own, refusal as a whole, and the loss of a server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.eventually import eventually
from support.models.tokenizers import encode_bytes
from support.processes.http_requests import lines
from support.processes.swarm import (
    BLOCKS,
    COUNTED_SECONDS,
    ENDLESS,
    MODEL,
    VOCABULARY,
    Endpoints,
    HashSwarm,
    metrics,
    total,
    two_spans,
)

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.hash_model import reference_tokens

BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "go",
    "max_tokens": 60,
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 7,
    "n": 4,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    counted = ("--metrics", "127.0.0.1:0")
    with two_spans(tmp_path_factory.mktemp("answers"), *counted, context=ENDLESS) as made:
        yield made


def expected(choice: int, count: int, text: str = "go") -> list[int]:
    prompt = encode_bytes(text)
    sampling = Sampling(temperature=1.0, seed=7, choice=choice)
    end = len(prompt) + count
    return reference_tokens(prompt, sampling, count, end, n_blocks=BLOCKS, vocabulary=VOCABULARY)


def streamed(stream: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in stream:
        if line.startswith("data: {"):
            yield from json.loads(line.removeprefix("data: "))["choices"]


def test_answers_have_indexes_and_noise_of_their_own(gateway: Endpoints) -> None:
    answer = httpx.post(f"{gateway.url}/v1/completions", json=BODY, timeout=60).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        expected(choice, 60) for choice in range(4)
    ]
    counts = {"prompt_tokens": 2, "completion_tokens": 240, "total_tokens": 242}
    assert answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_prompt_of_several_answers_is_counted_once(gateway: Endpoints) -> None:
    def tokens(name: str, **labels: str) -> float:
        return gateway.metric(f"modelswarm_gateway_{name}_total", **labels)

    before = tokens("tokens", kind="prompt"), tokens("reused_tokens")
    httpx.post(f"{gateway.url}/v1/completions", json=BODY, timeout=60)
    assert (tokens("tokens", kind="prompt"), tokens("reused_tokens")) == (before[0] + 2, before[1])


def test_the_openai_client_streams_several_answers(gateway: Endpoints) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 20,
            "n": 3,
            "temperature": 1.0,
            "seed": 5,
            "extra_body": {"ignore_eos": True},
        }
        whole = client.chat.completions.create(**fields)
        chunks = list(client.chat.completions.create(**fields, stream=True))
    texts = ["", "", ""]
    finished = []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        finished += [choice.index] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(finished) == [0, 1, 2]
    assert len({chunk.id for chunk in chunks}) == 1


def count_rows(swarm: HashSwarm) -> int:
    """Return the rows that both servers have run."""
    targets = [swarm.member(name)["metrics"] for name in ("s0", "s1")]
    return round(sum(total(metrics(each), "modelswarm_server_rows_total") for each in targets))


def test_prompt_is_computed_once(swarm: HashSwarm, gateway: Endpoints) -> None:
    """R15 (forks): each further answer copies the KV of the prompt, and runs the prompt's last row."""
    before = count_rows(swarm)
    body = BODY | {"prompt": "g" * 600, "max_tokens": 5}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60).json()
    tokens = [choice["token_ids"] for choice in answer["choices"]]
    assert tokens == [expected(choice, 5, "g" * 600) for choice in range(4)]
    eventually("the rows are counted", lambda: count_rows(swarm) - before >= 2 * 600)
    time.sleep(COUNTED_SECONDS)
    most = 2 * (600 + 4 * 5)  # two spans: one prompt, and the generated rows of four answers
    assert count_rows(swarm) - before <= most


@pytest.mark.full
def test_each_answer_survives_a_kill_of_the_tail(swarm: HashSwarm, gateway: Endpoints) -> None:
    count = 1500
    got: list[list[int]] = [[], [], [], []]
    with closing(lines(gateway, BODY | {"max_tokens": count})) as stream:
        for events, choice in enumerate(streamed(stream)):
            got[choice["index"]] += choice.get("token_ids", [])
            if events == 200:
                swarm.kill("s1")
                swarm.server("s2", "2:4")
    assert got == [expected(choice, count) for choice in range(4)]


def test_family_without_room_is_refused_as_a_whole(gateway: Endpoints) -> None:
    """Pages suffice for ten sessions of the whole context."""
    body = BODY | {"n": 12, "max_tokens": ENDLESS - 10}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "no_capacity")
    again = httpx.post(f"{gateway.url}/v1/completions", json=BODY, timeout=60)
    assert again.status_code == 200, "the granted pages were given back"


def test_idle_session_makes_room_for_all_answers(tmp_path: Path) -> None:
    """The first answer has no room beside the session, and both have once it is dropped."""
    pages = 60  # of 16 positions; a tenth is kept for recoveries: 29 for the session, or 26 for each answer
    with two_spans(tmp_path, "--pages", f"{pages}") as swarm:
        url = f"{swarm.gateway().url}/v1/completions"
        idle = {"model": MODEL, "prompt": "a" * 460, "max_tokens": 5, "session_id": "idle"}
        assert httpx.post(url, json=idle, timeout=60).status_code == 200
        made = httpx.post(url, json=BODY | {"n": 2, "max_tokens": 405}, timeout=60)
        assert made.status_code == 200, made.text


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": 129}, {"n": 2, "session_id": "x"}])
def test_wrong_number_of_answers_is_refused(gateway: Endpoints, fields: dict[str, Any]) -> None:
    answer = httpx.post(f"{gateway.url}/v1/completions", json=BODY | fields, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
