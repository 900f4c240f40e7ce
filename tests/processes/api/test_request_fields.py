"""Every field of every table, posted to a real swarm: obeyed ones change the answer, the others do what they say.

A field that becomes OBEYED needs an entry in `EFFECTS`: values with which the answer is another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.processes.swarm import MODEL

from modelswarm_gateway.api.fields.openai import (
    CHAT,
    COMPLETIONS,
    CONTENT_PART,
    MESSAGE,
    STREAM_OPTIONS,
)
from modelswarm_gateway.api.fields.states import FieldTable, NoEffect, Obeyed, Refused, Renamed

Body = dict[str, Any]
SAMPLED: Body = {"model": MODEL, "max_tokens": 24, "temperature": 1, "seed": 7, "ignore_eos": True}
LONG: Body = {"max_tokens": 450}  # in which the end token is drawn
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
STOPS: Body = {"max_tokens": 100, "stop": list("abcdefghijklmno")}
SEEDS = range(7, 40)  # tried in turn: the end token is drawn with some of them only
ODD = {"odd": ["value"]}  # harmless for no field


def with_messages(*messages: Body) -> Body:
    return {**SAMPLED, "messages": list(messages)}


def of_chat(fields: Body) -> Body:
    return with_messages({"role": "user", "content": "tell me"}) | fields


def of_completions(fields: Body) -> Body:
    return {**SAMPLED, "prompt": "tell me"} | fields


def of_message(fields: Body) -> Body:
    return with_messages({"role": "assistant", "content": "tell me"} | fields)


def of_part(fields: Body) -> Body:
    part = {"type": "text", "text": "tell me"} | fields
    return with_messages({"role": "assistant", "content": [part]})


def of_stream_options(fields: Body) -> Body:
    return of_completions({"stream": True, "stream_options": fields})


# Table -> path of the endpoint, and the function that builds a body with fields of that table.
PLACES: dict[str, tuple[FieldTable, str, Callable[[Body], Body]]] = {
    "chat": (CHAT, "/v1/chat/completions", of_chat),
    "completions": (COMPLETIONS, "/v1/completions", of_completions),
    "message": (MESSAGE, "/v1/chat/completions", of_message),
    "part": (CONTENT_PART, "/v1/chat/completions", of_part),
    "stream_options": (STREAM_OPTIONS, "/v1/completions", of_stream_options),
}

BEAMS: Body = {"num_beams": 3, "n": 3, "temperature": 0}
_SHARED: dict[str, tuple[Body, Body]] = {
    # field: (fields of the first request, those that the second one has beside them)
    "model": ({}, {"model": "none"}),
    "max_tokens": ({}, {"max_tokens": 5}),
    "temperature": ({}, {"temperature": 0}),
    "top_p": ({}, {"top_p": 0.01}),
    "top_k": ({}, {"top_k": 1}),
    "min_p": ({}, {"min_p": 1}),
    "repetition_penalty": ({}, {"repetition_penalty": 10}),
    "seed": ({}, {"seed": 8}),
    "stop": ({"max_tokens": 100}, STOPS),
    "stream": ({}, {"stream": True}),
    "stream_options": ({"stream": True}, {"stream_options": {"include_usage": True}}),
    "ignore_eos": (LONG | {"ignore_eos": False}, {"ignore_eos": True}),
    "return_token_ids": ({}, {"return_token_ids": True}),
    "n": ({}, {"n": 2}),
    "presence_penalty": ({}, {"presence_penalty": 1}),
    "frequency_penalty": ({}, {"frequency_penalty": 1}),
    "typical_p": ({}, {"typical_p": 0.5}),
    "no_repeat_ngram_size": ({}, {"no_repeat_ngram_size": 2}),
    "logit_bias": ({}, {"logit_bias": {"100": 5}}),
    "bad_words": ({}, {"bad_words": ["ab"]}),
    "bad_words_ids": ({}, {"bad_words_ids": [[97], [98, 99]]}),
    "min_tokens": ({}, {"min_tokens": 3}),
    "num_beams": (BEAMS, {"num_beams": 5}),
    "use_beam_search": ({"temperature": 0}, {"use_beam_search": True, "n": 3}),
    "allowed_token_ids": ({}, {"allowed_token_ids": [70, 71]}),
    "response_format": ({}, {"response_format": {"type": "json_object"}}),
    "structured_outputs": ({}, {"structured_outputs": {"regex": "a"}}),
    "guided_json": ({}, {"guided_json": {"type": "integer"}}),
    "guided_regex": ({}, {"guided_regex": "a"}),
    "guided_choice": ({}, {"guided_choice": ["a"]}),
    "guided_grammar": ({}, {"guided_grammar": 'start: "a"'}),
    "guided_whitespace_pattern": ({}, {"guided_json": {}, "guided_whitespace_pattern": " "}),
    "grammar": ({}, {"grammar": 'start: "a"'}),
    "stop_token_ids": (LONG, {"stop_token_ids": list(range(70, 110))}),
    "prompt_logprobs": ({}, {"prompt_logprobs": 1}),
    "include_stop_str_in_output": (STOPS, {"include_stop_str_in_output": True}),
    "skip_special_tokens": ({"logit_bias": {"3": 100}}, {"skip_special_tokens": False}),
    "truncate_prompt_tokens": ({}, {"truncate_prompt_tokens": 2}),
    "truncation_side": ({"truncate_prompt_tokens": 2}, {"truncation_side": "right"}),
}
# Fields of sessions need several requests: `test_fields_of_sessions_have_their_effects`.
SESSION_FIELDS = {"session_id", "append", "session_position"}
# The tokenizer of this swarm adds no special tokens: test_tokenization.py has one that does.
# Its model has no parser of tool calls: test_tool_calls.py and test_tool_requests.py have one.
TOOL_FIELDS = {"tools", "tool_choice", "parallel_tool_calls", "include_reasoning"}
# Beams that all end for their length have one order under every penalty: test_beams.py has ends.
OTHER_TESTS = {"add_special_tokens", "length_penalty", "early_stopping"} | TOOL_FIELDS
EFFECTS: dict[str, dict[str, tuple[Body, Body]]] = {
    "chat": {
        **_SHARED,
        "messages": ({}, {"messages": [{"role": "user", "content": "other"}]}),
        "max_completion_tokens": ({"max_tokens": None}, {"max_completion_tokens": 5}),
        "reasoning_effort": ({}, {"reasoning_effort": "low"}),
        "chat_template_kwargs": ({}, {"chat_template_kwargs": {"tone": "kind"}}),
        "add_generation_prompt": ({}, {"add_generation_prompt": False}),
        "documents": ({}, {"documents": [{"title": "t", "text": "x"}]}),
        "logprobs": ({}, {"logprobs": True}),
        "top_logprobs": ({"logprobs": True}, {"top_logprobs": 2}),
        "return_tokens_as_token_ids": ({"logprobs": True}, {"return_tokens_as_token_ids": True}),
        "continue_final_message": ({}, {"continue_final_message": True}),
    },
    "completions": {
        **_SHARED,
        "prompt": ({}, {"prompt": "other"}),
        "logprobs": ({}, {"logprobs": 1}),
        "return_tokens_as_token_ids": ({"logprobs": 1}, {"return_tokens_as_token_ids": True}),
        "echo": ({}, {"echo": True}),
    },
    "message": {
        "role": ({}, {"role": "user"}),
        "content": ({}, {"content": "other"}),
        "name": ({}, {"name": "Ann"}),
        "refusal": ({"content": None, "refusal": "no"}, {"refusal": "never"}),
        "tool_calls": ({}, {"tool_calls": [CALL]}),
        "tool_call_id": ({}, {"tool_call_id": "c1"}),
        "reasoning": ({}, {"reasoning": "so"}),
        "reasoning_content": ({}, {"reasoning_content": "so"}),
    },
    "part": {
        "type": ({}, {"type": "refusal", "refusal": "no", "text": None}),
        "text": ({}, {"text": "other"}),
        "refusal": ({"type": "refusal", "refusal": "no", "text": None}, {"refusal": "never"}),
    },
    "stream_options": {
        "include_usage": ({}, {"include_usage": True}),
        "continuous_usage_stats": ({"include_usage": True}, {"continuous_usage_stats": True}),
    },
}


TIERED = [
    pytest.param(place, marks=pytest.mark.full) if place == "completions" else place
    for place in PLACES
]
"""The fields of completions are those of chat but for a few."""


def answer_of(client: httpx.Client, path: str, body: Body) -> object:
    """Return the answer without what differs from request to request."""
    answer = client.post(path, json=body)
    if answer.headers["content-type"].startswith("text/event-stream"):
        return stream_of(answer)
    made = answer.json()
    return {name: value for name, value in made.items() if name not in ("id", "created")}


def stream_of(answer: httpx.Response) -> object:
    """Return the whole text of a stream, and its kinds of events: tokens that come together share one."""
    text, kinds = "", []
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                text += choice.pop("text", "") + choice.pop("delta", {}).get("content", "")
            kind = (event["choices"], sorted(event.get("usage") or ()), sorted(event))
            if kind not in kinds:
                kinds.append(kind)
    return text, kinds


class Effects:
    """Compares answers with and without a field. Answers without one are asked for twice, and kept for other fields."""

    def __init__(self, client: httpx.Client, path: str) -> None:
        self._client = client
        self._path = path
        self._plain: dict[str, object] = {}

    def has_effect(self, body: Body, changed: Body) -> bool:
        return self._plain_answer(body) != answer_of(self._client, self._path, changed)

    def _plain_answer(self, body: Body) -> object:
        key = json.dumps(body, sort_keys=True)
        if key not in self._plain:
            plain = answer_of(self._client, self._path, body)
            assert plain == answer_of(self._client, self._path, body), "the answer is not repeated"
            self._plain[key] = plain
        return self._plain[key]


@pytest.mark.parametrize("place", TIERED)
def test_every_obeyed_field_has_an_effect(client: httpx.Client, place: str) -> None:
    table, path, build = PLACES[place]
    missing = table.obeyed - SESSION_FIELDS - OTHER_TESTS - EFFECTS[place].keys()
    assert not missing, "give every obeyed field an entry in EFFECTS"
    effects = Effects(client, path)
    for name, (first, second) in EFFECTS[place].items():
        seeds: list[Body] = [{}] if name == "seed" else [{"seed": seed} for seed in SEEDS]
        assert any(
            effects.has_effect(build(first) | seed, build(first | second) | seed) for seed in seeds
        ), f"{name} changes nothing"


@pytest.mark.parametrize("place", ["chat", "completions"])
def test_fields_of_sessions_have_their_effects(client: httpx.Client, place: str) -> None:
    _, path, build = PLACES[place]
    name = f"fields-{place}"
    session = f"/v1/sessions/{name}?model={MODEL}"
    assert client.delete(session).status_code == 404

    def turn(**fields: Any) -> int:
        answer = client.post(path, json=build({"session_id": name, **fields}))
        assert answer.status_code == 200, answer.text
        prompt: int = answer.json()["usage"]["prompt_tokens"]
        return prompt

    whole = turn()
    assert turn() == whole
    appended = turn(append=True)
    assert appended > whole + SAMPLED["max_tokens"]
    assert whole < turn(append=True, session_position=whole) < appended
    assert client.delete(session).status_code == 200


@pytest.mark.parametrize("place", PLACES)
def test_every_refused_field_is_refused_by_name(client: httpx.Client, place: str) -> None:
    table, path, build = PLACES[place]
    names = [name for name, state in table.states.items() if isinstance(state, Refused | Renamed)]
    for name in names:
        answer = client.post(path, json=build({name: ODD}))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter"), name
        assert error["param"].split(".")[-1] == name
        assert name in error["message"]


@pytest.mark.parametrize("place", TIERED)
def test_harmless_values_and_effectless_fields_change_nothing(
    client: httpx.Client, place: str
) -> None:
    table, path, build = PLACES[place]
    short: Body = {} if place in ("message", "part", "stream_options") else {"max_tokens": 8}
    plain = answer_of(client, path, build(short))
    requests: list[Body] = []  # the first has one value of every field, the next another one
    for name, state in table.states.items():
        match state:
            case NoEffect():
                values: tuple[object, ...] = (ODD, "text", True)
            case Refused(_, harmless):
                values = (None, *harmless)
            case Renamed() | Obeyed():
                continue
        requests += [{} for _ in values[len(requests) :]]
        for fields, value in zip(requests, values, strict=False):
            fields[name] = value
    for fields in requests:
        assert answer_of(client, path, build(short | fields)) == plain, fields


def test_unknown_field_is_refused_with_a_hint(client: httpx.Client) -> None:
    for table, path, build in PLACES.values():
        answer = client.post(path, json=build({"no_such_field": 1}))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unknown_parameter"), table.of
        assert error["param"].split(".")[-1] == "no_such_field"
