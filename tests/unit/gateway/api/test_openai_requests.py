"""Requests of the OpenAI API: the fields that are accepted, refused and ignored."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from modelswarm_gateway.api.http.json_body import parse_json
from modelswarm_gateway.api.http.openai_requests import (
    UNSUPPORTED_FIELDS,
    parse_chat,
    parse_completion,
)
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.request import ChatPrompt, TextPrompt, TokenPrompt
from modelswarm_gateway.models.sampling_defaults import SamplingOptions

SMALL: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def find_refusal(body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat(body).to_generation_request()
    return caught.value


def test_minimal_request_uses_the_models_defaults() -> None:
    ask = parse_chat(SMALL).to_generation_request()
    assert ask.options == SamplingOptions()
    assert ask.prompt == ChatPrompt([{"role": "user", "content": "hi"}])
    assert (ask.stop, ask.session_id) == ((), None)


def test_every_supported_field_is_parsed() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 5,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": -3,
    }
    ask = parse_chat(
        SMALL | fields | {"ignore_eos": True, "stop": ["a", "b"], "session_id": "s"}
    ).to_generation_request()
    assert ask.options == SamplingOptions(**fields, ignore_eos=True)
    assert (ask.stop, ask.session_id) == (("a", "b"), "s")


def test_null_field_counts_as_unset() -> None:
    known = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "stream", "n", "tools")
    body = SMALL | dict.fromkeys([*known, *UNSUPPORTED_FIELDS, "user", "stream_options"])
    assert parse_chat(body).to_generation_request() == parse_chat(SMALL).to_generation_request()


def test_irrelevant_fields_are_ignored() -> None:
    extras = {
        "user": "u",
        "metadata": {"a": 1},
        "store": True,
        "service_tier": "auto",
        "hello": [1],
    }
    assert (
        parse_chat(SMALL | extras).to_generation_request()
        == parse_chat(SMALL).to_generation_request()
    )


def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    """LangChain's legacy class sends zero penalties, n 1, a list with one string, and nulls."""
    body = {
        "model": "m",
        "prompt": ["x"],
        "max_tokens": 256,
        "temperature": 0.7,
        "n": 1,
        "top_p": 1,
    }
    body |= {"presence_penalty": 0.0, "frequency_penalty": 0, "logprobs": None, "seed": None}
    assert parse_completion(body).to_generation_request().prompt == TextPrompt("x")
    plain = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "logit_bias": {},
    }
    assert (
        parse_chat(SMALL | plain | {"logprobs": False, "top_k": -1})
        .to_generation_request()
        .options.top_k
        == -1
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 1}),
        ("stop_token_ids", [5]),
        ("min_tokens", 3),
        ("modalities", ["text", "audio"]),
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 4),
        ("audio", {"voice": "x"}),
        ("skip_special_tokens", False),
        ("web_search_options", {}),
    ],
)
def test_unsupported_field_is_refused_by_name(field: str, value: object) -> None:
    error = find_refusal(SMALL | {field: value})
    assert (error.code, error.param) == (Code.UNSUPPORTED, field)
    assert field in error.message
    assert error.mapping.status == 400


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"model": None}, "model", "required"),
        ({"model": 5}, "model", "string"),
        ({"model": ""}, "model", "at least 1"),
        ({"messages": None}, "messages", "required"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'user'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "greater than or equal to 0"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "give one"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": math.nan}, "temperature", "finite"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"min_p": 2}, "min_p", "less than or equal to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"seed": 1 << 64}, "seed", "less than"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"stop": ["a", ""]}, "stop[1]", "none of them empty"),
        ({"stop": ["a"] * 17}, "stop", "up to 16"),
        ({"stop": {"a": 1}}, "stop", "string or a list"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": []}, "stream_options", "valid"),
        ({"session_id": 5}, "session_id", "string"),
        ({"session_id": "x" * 300}, "session_id", "at most 256"),
    ],
)
def test_invalid_field_is_named_with_what_is_allowed(
    changes: dict[str, Any], param: str, message: str
) -> None:
    error = find_refusal(SMALL | changes)
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)
    assert message in error.message
    assert param in error.message


def test_zero_tokens_and_equal_token_limits_are_accepted() -> None:
    assert parse_chat(SMALL | {"max_tokens": 0}).to_generation_request().options.max_tokens == 0
    both = {"max_tokens": 3, "max_completion_tokens": 3}
    assert parse_chat(SMALL | both).to_generation_request().options.max_tokens == 3
    assert (
        parse_chat(SMALL | {"max_completion_tokens": 4}).to_generation_request().options.max_tokens
        == 4
    )


def test_messages_are_normalized_for_the_chat_template() -> None:
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    prompt = parse_chat(SMALL | {"messages": messages}).to_generation_request().prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]


def test_template_variables_are_passed_through() -> None:
    extras = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    prompt = parse_chat(SMALL | extras).to_generation_request().prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.variables == {"enable_thinking": False, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", TextPrompt("x")),
        (["x"], TextPrompt("x")),
        ([1, 2], TokenPrompt((1, 2))),
        ([[1, 2]], TokenPrompt((1, 2))),
        ("", TextPrompt("")),
    ],
)
def test_prompt_is_accepted_in_its_four_forms(prompt: object, expected: object) -> None:
    assert (
        parse_completion({"model": "m", "prompt": prompt}).to_generation_request().prompt
        == expected
    )


@pytest.mark.parametrize(
    "prompt", [5, [], ["a", "b"], [[1], [2]], [-1], [1, "a"], [True], {}, [1.5]]
)
def test_invalid_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion({"model": "m", "prompt": prompt}).to_generation_request()
    assert (caught.value.param or "").startswith("prompt")
    assert caught.value.mapping.status == 400


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_body_that_is_not_json_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parse_json(raw)
    assert caught.value.mapping.status == 400


def test_surrogate_pair_is_one_character() -> None:
    assert parse_json(b'"\\ud83d\\ude00"') == "😀"
    assert parse_json(json.dumps("\\ud800").encode()) == "\\ud800"


@pytest.mark.parametrize("body", [[], "x", 5, None])
def test_body_other_than_an_object_is_refused(body: object) -> None:
    assert "JSON object" in find_refusal(body).message
