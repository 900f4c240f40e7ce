"""Requests that tests of the HTTP API send, and functions that read their answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx
from support.models.tokenizers import encode_bytes
from support.processes.streams import ANSWER_SECONDS
from support.processes.swarm import BLOCKS, CONTEXT, ENDLESS, MODEL, VOCABULARY, Endpoints

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.hash_model import reference_tokens

LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "go",
    "max_tokens": CONTEXT - 2,
    "ignore_eos": True,
}
IDS: dict[str, Any] = LONG | {"return_token_ids": True}
FOREVER: dict[str, Any] = IDS | {"max_tokens": ENDLESS - 2}
"""A request whose answer outlasts its test, in a swarm with `context=ENDLESS`."""
READ_ON = 50  # tokens read after the awaited event
LOOK_EVERY = 20  # lines of a stream between two checks; a check takes longer than a token


def lines(endpoints: Endpoints, body: dict[str, Any], after: str = "") -> Generator[str]:
    """Yield the lines of a stream as they come. `after`: id of the last event of a broken stream, which is resumed."""
    headers = {"Last-Event-ID": after} if after else {}
    with (
        httpx.Client(timeout=ANSWER_SECONDS) as client,
        client.stream(
            "POST", f"{endpoints.url}/v1/completions", json=body | {"stream": True}, headers=headers
        ) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        yield from (line for line in answer.iter_lines() if line)


def choices_of(stream: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the id and the choice of each event of a stream."""
    event_id = ""
    for line in stream:
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: {"):
            yield event_id, json.loads(line.removeprefix("data: "))["choices"][0]


def read_until(
    endpoints: Endpoints,
    body: dict[str, Any],
    act: Callable[[], object],
    done: Callable[[list[str]], object],
    at: int = 20,
) -> tuple[list[int], list[str]]:
    """Read a stream, and call `act` after `at` tokens. After `done(comments)` read `READ_ON` tokens more, and stop.

    Return its tokens and its comments.
    """
    got: list[int] = []
    comments: list[str] = []
    acted, end = False, 0
    with closing(lines(endpoints, body)) as stream:
        for number, line in enumerate(stream):
            got += tokens_of(line)
            if line.startswith(":"):
                comments.append(line)
            if not acted and len(got) > at:
                act()
                acted = True
            elif acted and not end and (line.startswith(":") or number % LOOK_EVERY == 0):
                end = len(got) + READ_ON if done(comments) else 0
            if end and len(got) >= end:
                break
    assert end, f"the stream ended after {len(got)} tokens"
    return got, comments


@dataclass
class AnswerTokens:
    """The tokens of one of several answers, with their log probabilities if they were asked for."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def read_answers(
    url: str, body: dict[str, Any], at: int = 0, act: Callable[[], object] = lambda: None
) -> list[AnswerTokens]:
    """Read a stream of several answers to its end; call `act` when there are `at` tokens of all."""
    got = [AnswerTokens() for _ in range(body["n"])]
    acted, sent = False, body | {"stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=sent, timeout=ANSWER_SECONDS) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    found = got[choice["index"]]
                    found.ids += choice.get("token_ids") or []
                    found.logprobs += (choice["logprobs"] or {"token_logprobs": []})[
                        "token_logprobs"
                    ]
            if not acted and sum(len(each.ids) for each in got) > at:
                act()
                acted = True
    assert acted, "the answers ended too early"
    return got


def expected_tokens(count: int, prompt: str = "go", sampling: Sampling | None = None) -> list[int]:
    """Return the first tokens of the answer to `prompt`, as the reference computes them."""
    tokens = encode_bytes(prompt)
    return reference_tokens(
        tokens,
        sampling or Sampling(),
        count,
        len(tokens) + count,
        n_blocks=BLOCKS,
        vocabulary=VOCABULARY,
    )


def tokens_of(line: str) -> list[int]:
    if not line.startswith("data: {"):
        return []
    choices = json.loads(line.removeprefix("data: "))["choices"]
    ids: list[int] = choices[0].get("token_ids", []) if choices else []
    return ids


def whole(endpoints: Endpoints, body: dict[str, Any]) -> list[int]:
    answer = httpx.post(f"{endpoints.url}/v1/completions", json=body, timeout=ANSWER_SECONDS)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids
