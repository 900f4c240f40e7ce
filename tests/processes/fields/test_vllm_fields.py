"""Fields that vLLM adds to OpenAI's: exact effects over HTTP, whole, streamed, and across the loss of a server."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import pairwise
from typing import Any

import httpx
import pytest
from support.models.tokenizers import END, SPECIALS, byte_level, encode_bytes
from support.processes.http_requests import lines
from support.processes.swarm import ENDLESS, MODEL, Endpoints, HashSwarm

BODY: dict[str, Any] = {"model": MODEL, "temperature": 1, "seed": 7, "ignore_eos": True}
HI = [{"role": "user", "content": "hi"}]
Choice = dict[str, Any]


def post(gateway: Endpoints, path: str = "completions", **fields: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/{path}", json=BODY | fields, timeout=60)


def whole(gateway: Endpoints, **fields: Any) -> Choice:
    made = post(gateway, **({"prompt": "tell me"} | fields))
    assert made.status_code == 200, made.text
    choice: Choice = made.json()["choices"][0]
    return choice


def events(gateway: Endpoints, **fields: Any) -> list[dict[str, Any]]:
    with closing(lines(gateway, BODY | {"prompt": "tell me"} | fields)) as stream:
        return [json.loads(line[6:]) for line in stream if line.startswith("data: {")]


def special_text(tokens: list[int]) -> str:
    return byte_level().decode(tokens, skip_special_tokens=False)


def test_prompt_logprobs_have_the_shape_of_vllm(gateway: Endpoints) -> None:
    choice = whole(gateway, prompt_logprobs=2, max_tokens=1, echo=True, logprobs=2)
    found, echoed = choice["prompt_logprobs"], choice["logprobs"]
    assert found[0] is None
    tokens = encode_bytes("tell me")
    for place, token in enumerate(tokens[1:], 1):
        entry = found[place]
        assert entry[str(token)]["logprob"] == echoed["token_logprobs"][place]
        assert entry[str(token)]["decoded_token"] == "tell me"[place]
        ranked = sorted((each["rank"], each["logprob"]) for each in entry.values() if each["rank"])
        assert [rank for rank, _ in ranked] == [1, 2]
        assert ranked[0][1] >= ranked[1][1]
    only = whole(gateway, prompt_logprobs=0, max_tokens=0)
    assert [list(entry) for entry in only["prompt_logprobs"][1:]] == [[str(t)] for t in tokens[1:]]


def test_chat_has_the_prompt_logprobs_beside_its_choices(gateway: Endpoints) -> None:
    made = post(
        gateway,
        "chat/completions",
        messages=HI,
        max_tokens=1,
        prompt_logprobs=1,
        return_token_ids=True,
    ).json()
    tokens = made["prompt_token_ids"]
    scores = made["prompt_logprobs"]
    assert scores[0] is None
    assert all(str(token) in entry for token, entry in zip(tokens[1:], scores[1:], strict=True))
    assert "prompt_logprobs" not in made["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_and_special_tokens_can_be_shown(gateway: Endpoints, stream: bool) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 200,
        "stop": list("abcdefghijklmno"),
        "logit_bias": {str(token): 1 for token in range(3, 5)},
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    cut = whole(gateway, **fields)
    kept = whole(gateway, **fields, include_stop_str_in_output=True, logprobs=0)
    assert kept["text"] == special_text(kept["token_ids"])
    assert kept["text"] == cut["text"] + kept["text"][-1]
    assert kept["text"][-1] in "abcdefghijklmno"
    assert len(kept["logprobs"]["tokens"]) == len(kept["token_ids"])
    if stream:
        got = events(gateway, **fields, include_stop_str_in_output=True)
        assert "".join(event["choices"][0]["text"] for event in got) == kept["text"]


def test_stop_token_is_shown_with_its_text(gateway: Endpoints) -> None:
    fields: dict[str, Any] = {"allowed_token_ids": [END], "ignore_eos": False, "max_tokens": 9}
    assert whole(gateway, **fields)["text"] == ""
    kept = {"include_stop_str_in_output": True}
    assert whole(gateway, **fields, **kept)["text"] == ""
    shown = whole(gateway, **fields, **kept, skip_special_tokens=False)
    assert (shown["text"], shown["finish_reason"]) == (SPECIALS[END], "stop")


@pytest.mark.full
def test_shown_special_tokens_survive_a_kill_of_the_tail(
    swarm: HashSwarm, gateway: Endpoints
) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 1500,
        "allowed_token_ids": [3, 4, *encode_bytes("abcdefgh")],
        "skip_special_tokens": False,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    text, tokens = "", []
    with closing(lines(gateway, BODY | {"prompt": "go"} | fields)) as stream:
        for number, line in enumerate(stream):
            event = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
            for choice in event["choices"]:
                text += choice["text"]
                tokens += choice.get("token_ids", [])
                assert event["usage"]["completion_tokens"] == len(tokens)
            if number == 200:
                swarm.kill("s1")
                swarm.server("s2", "2:4")
    assert any(special in text for special in SPECIALS[3:])
    assert text == special_text(tokens)
    assert len(tokens) == 1500
    fields.pop("stream_options")
    assert whole(gateway, prompt="go", **fields)["token_ids"] == tokens


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, "l me"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, "tell"),
        ({"truncate_prompt_tokens": 400}, "tell me"),
        ({"truncate_prompt_tokens": -1}, "tell me"),
        ({"truncate_prompt_tokens": 2, "prompt": encode_bytes("tell")}, "ll"),
    ],
)
def test_truncated_prompt_keeps_one_side(
    gateway: Endpoints, fields: dict[str, Any], kept: str
) -> None:
    choice = whole(gateway, **fields, max_tokens=5, return_token_ids=True)
    assert choice["prompt_token_ids"] == encode_bytes(kept)
    assert choice["text"] == whole(gateway, prompt=kept, max_tokens=5)["text"]


@pytest.mark.full
def test_prompt_beyond_the_context_is_truncated_to_fit(gateway: Endpoints) -> None:
    prompt = "ab" * (ENDLESS // 2 + 100)
    refused = post(gateway, prompt=prompt, max_tokens=5)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    made = post(gateway, prompt=prompt, max_tokens=5, truncate_prompt_tokens=-1).json()
    assert made["usage"]["prompt_tokens"] == ENDLESS - 5


def test_final_message_is_continued(gateway: Endpoints) -> None:
    started = [*HI, {"role": "assistant", "content": "I think "}]
    fields: dict[str, Any] = {"max_tokens": 5, "return_token_ids": True}
    made = post(
        gateway, "chat/completions", messages=started, continue_final_message=True, **fields
    ).json()
    text = special_text(made["prompt_token_ids"])
    assert text == "<|begin|><|user|>hi<|end|><|assistant|>I think "
    same = whole(gateway, prompt=made["prompt_token_ids"], **fields)
    assert made["choices"][0]["token_ids"] == same["token_ids"]


def test_every_event_can_have_the_usage_so_far(gateway: Endpoints) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for n in (1, 2):
        got = events(gateway, max_tokens=20, n=n, stream_options=options)
        for index in range(n):
            mine = [each for each in got if [c["index"] for c in each["choices"]] == [index]]
            counts = [each["usage"]["completion_tokens"] for each in mine]
            assert all(first <= second for first, second in pairwise(counts))
            assert counts[-1] == 20
            assert {each["usage"]["prompt_tokens"] for each in mine} == {7}
        assert got[-1]["usage"]["completion_tokens"] == 20 * n


def test_tokens_of_logprobs_can_be_named_by_id(gateway: Endpoints) -> None:
    fields: dict[str, Any] = {"max_tokens": 6, "return_tokens_as_token_ids": True}
    choice = whole(gateway, logprobs=2, return_token_ids=True, **fields)
    named = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == named
    tops = choice["logprobs"]["top_logprobs"]
    assert all(name in top for name, top in zip(named, tops, strict=True))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("completions", {"truncation_side": "left"}, "truncation_side"),
        (
            "completions",
            {"truncate_prompt_tokens": 1, "append": True, "session_id": "s"},
            "truncate_prompt_tokens",
        ),
        (
            "completions",
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        (
            "chat/completions",
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (
            "chat/completions",
            {
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "content": "a",
                        "reasoning": "b",
                        "reasoning_content": "c",
                    },
                ]
            },
            "messages[1].reasoning_content",
        ),
    ],
)
def test_contradiction_is_refused_by_name(
    gateway: Endpoints, path: str, fields: dict[str, Any], param: str
) -> None:
    prompt = {"messages": HI} if path.startswith("chat") else {"prompt": "tell me"}
    answer = post(gateway, path, **(prompt | fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
