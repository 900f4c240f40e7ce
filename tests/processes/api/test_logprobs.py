"""Log probabilities over HTTP: OpenAI's shapes, whole and streamed, across the loss of the tail and a resume."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import httpx
import openai
import pytest
from support.processes.http_requests import choices_of, lines
from support.processes.swarm import MODEL, Endpoints, HashSwarm

from modelswarm_gateway.generation.resumption import parse_event_id

HI = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "go",
    "max_tokens": 400,
    "ignore_eos": True,
    "logprobs": 2,
    "return_token_ids": True,
}


def whole(gateway: Endpoints, body: dict[str, Any], path: str = "completions") -> dict[str, Any]:
    answer = httpx.post(f"{gateway.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()["choices"][0]
    return made


def joined(choices: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the four lists of streamed log probabilities, each joined."""
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    return {name: [x for part in parts for x in part[name]] for name in parts[0]}


def test_completion_has_one_entry_per_token_with_offsets(gateway: Endpoints) -> None:
    choice = whole(gateway, BODY)
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(choice["token_ids"]) == 400
    assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == 400
    offsets = found["text_offset"]
    assert offsets == sorted(offsets)
    checked = 0
    for token, offset in zip(found["tokens"], offsets, strict=True):
        if not token.startswith(("bytes:", "<|")):  # bytes that are no character may precede it
            end = min((at for at in offsets if at > offset), default=None)
            assert token in choice["text"][offset:end]
            checked += 1
    assert checked > 50
    for token, value, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[token] == value
        assert len(top) <= 2


def test_streamed_logprobs_equal_the_whole_ones(gateway: Endpoints) -> None:
    with closing(lines(gateway, BODY)) as stream:
        streamed = [choice for _, choice in choices_of(stream)]
    assert joined(streamed) == whole(gateway, BODY)["logprobs"]


def test_stop_string_excludes_the_entries_of_its_tokens(gateway: Endpoints) -> None:
    plain = whole(gateway, BODY)
    place = next(i for i in range(40, 300) if plain["text"][i : i + 2].isascii())
    stop = plain["text"][place : place + 2]
    choice = whole(gateway, BODY | {"stop": stop})
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == plain["text"][: plain["text"].index(stop)]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == [at for at in plain["logprobs"]["text_offset"] if at < len(choice["text"])]


def test_the_openai_client_reads_chat_logprobs(gateway: Endpoints) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=12,
            logprobs=True,
            top_logprobs=3,
            extra_body={"ignore_eos": True},
        )
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    assert len(found.content) == 12
    for entry in found.content:
        assert len(entry.top_logprobs) == 3
        assert entry.bytes == entry.top_logprobs[0].bytes
        assert bytes(entry.bytes or ()).decode(errors="replace") == entry.token


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        (
            "chat/completions",
            {"messages": HI, "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
        ),
        ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
    ],
)
def test_logprobs_out_of_range_are_refused(
    gateway: Endpoints, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = httpx.post(f"{gateway.url}/v1/{path}", json={"model": MODEL} | fields, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.full
def test_resumed_stream_repeats_the_logprobs(gateway: Endpoints) -> None:
    body = BODY | {"session_id": "again", "max_tokens": 2000}
    expected = whole(gateway, BODY | {"max_tokens": 2000})["logprobs"]
    with closing(lines(gateway, body)) as stream:
        first = []
        for event_id, choice in choices_of(stream):
            first.append(choice)
            if parse_event_id(event_id)[0] > 50:
                break
    rest = [choice for _, choice in choices_of(lines(gateway, body, event_id))]
    assert joined(first + rest) == expected


@pytest.mark.full
def test_logprobs_are_the_same_across_a_kill_of_the_tail(
    swarm: HashSwarm, gateway: Endpoints
) -> None:
    body = BODY | {"max_tokens": 1500}
    expected = whole(gateway, body)["logprobs"]
    with closing(lines(gateway, body)) as stream:
        got = []
        for _, choice in choices_of(stream):
            got.append(choice)
            if len(got) == 50:
                swarm.kill("s1")
                swarm.server("s2", "2:4")
    assert joined(got) == expected
