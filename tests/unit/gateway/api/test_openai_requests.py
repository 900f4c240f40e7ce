"""Requests of the OpenAI API: the fields that are accepted, refused and without effect."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from modelswarm_gateway.api.fields.openai import CHAT
from modelswarm_gateway.api.http.json_body import parse_json
from modelswarm_gateway.api.http.openai_requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    TextPart,
    parse_body,
    parse_chat,
    parse_completion,
)
from modelswarm_gateway.api.http.sessions import ForkRequest, SessionRequest
from modelswarm_gateway.api.http.validation_messages import ALLOWED
from modelswarm_gateway.api.tokenization import DetokenizeRequest, TokenizeRequest
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.request import ChatPrompt, TextPrompt, TokenPrompt
from modelswarm_gateway.models.sampling_defaults import SamplingOptions

SMALL: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


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
    body = SMALL | dict.fromkeys(CHAT.states.keys() - SMALL.keys())
    assert parse_chat(body).to_generation_request() == parse_chat(SMALL).to_generation_request()


def test_fields_without_effect_are_left_out() -> None:
    extras = {
        "user": "u",
        "metadata": {"a": 1},
        "store": True,
        "service_tier": "auto",
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
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("suffix", "x"),
        ("best_of", 4),
        ("audio", {"voice": "x"}),
        ("spaces_between_special_tokens", False),
        ("web_search_options", {}),
        ("add_special_tokens", True),
        ("ebnf", "root ::= x"),
        ("guided_json_object", True),
        ("logits_processors", ["x"]),
        ("max_new_tokens", 5),
        ("repeat_penalty", 1.1),
        ("enable_thinking", False),
    ],
)
def test_unsupported_field_is_refused_by_name(field: str, value: object) -> None:
    error = find_refusal(SMALL | {field: value})
    assert (error.code, error.param) == (Code.UNSUPPORTED, field)
    assert field in error.message
    assert error.mapping.status == 400


@pytest.mark.parametrize("prompt", [[5, 6], [[5], [6]]])
def test_special_tokens_are_refused_beside_token_ids(prompt: list[object]) -> None:
    body = {"model": "m", "prompt": prompt, "add_special_tokens": True}
    with pytest.raises(ApiError, match="only a text gets them") as caught:
        parse_completion(body).to_generation_requests()
    assert caught.value.param == "add_special_tokens"
    made = parse_completion(body | {"add_special_tokens": False}).to_generation_requests()
    assert len(made) == (2 if isinstance(prompt[0], list) else 1)


def test_value_under_two_names_is_accepted_if_equal() -> None:
    body = SMALL | {"max_tokens": 5, "max_new_tokens": 5, "n_predict": 5}
    assert parse_chat(body).to_generation_request().options.max_tokens == 5
    error = find_refusal(body | {"max_new_tokens": 6})
    assert (error.param, "use max_tokens" in error.message) == ("max_new_tokens", True)


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"model": None}, "model", "required"),
        ({"model": 5}, "model", "string"),
        ({"model": ""}, "model", 'not empty, not ""'),
        ({"messages": None}, "messages", "required"),
        ({"messages": []}, "messages", "at least one message, each an object, not a list of 0"),
        ({"messages": "hi"}, "messages", "list"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0].role",
            "one of developer, system, user",
        ),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "a string, or a list of text parts, which are objects, not 5",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            '"text" or "refusal", not "image_url"',
        ),
        ({"max_tokens": -1}, "max_tokens", "a whole number from 0, not -1"),
        ({"max_tokens": 1.5}, "max_tokens", "a whole number from 0, not 1.5"),
        ({"max_tokens": True}, "max_tokens", "a whole number from 0, not true"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "from 0, not -1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "give one"),
        ({"temperature": -0.1}, "temperature", "a number from 0 to 2, not -0.1"),
        ({"temperature": 2.1}, "temperature", "a number from 0 to 2, not 2.1"),
        ({"temperature": "1"}, "temperature", 'a number from 0 to 2, not "1"'),
        ({"temperature": math.nan}, "temperature", "not NaN"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_p": 1.1}, "top_p", "at most 1"),
        ({"top_k": -2}, "top_k", "from -1"),
        ({"min_p": 2}, "min_p", "from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"seed": 1 << 64}, "seed", "from -2^63 to 2^64 - 1"),
        (
            {"stop": ""},
            "stop",
            'a string of 1 to 1000 characters, or a list of at most 16 such strings, not ""',
        ),
        ({"stop": ["a", ""]}, "stop[1]", 'but stop[1] is ""'),
        ({"stop": ["a", "x" * 1001]}, "stop[1]", "1 to 1000 characters"),
        ({"stop": "x" * 1001}, "stop", "not a string of 1001 characters"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 such strings, not a list of 17"),
        ({"stop": {"a": 1}}, "stop", "not an object"),
        ({"stream": "yes"}, "stream", 'true or false, not "yes"'),
        ({"stream_options": []}, "stream_options", "an object, not a list of 0"),
        ({"messages": [5]}, "messages[0]", "but messages[0] is 5"),
        ({"session_id": 5}, "session_id", "a string of 1 to 256 characters, not 5"),
        ({"session_id": "x" * 300}, "session_id", "not a string of 300 characters"),
    ],
)
def test_invalid_field_is_named_with_what_is_allowed(
    changes: dict[str, Any], param: str, message: str
) -> None:
    error = find_refusal(SMALL | changes)
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)
    assert message in error.message
    assert param in error.message


def test_every_field_has_a_sentence_of_what_is_allowed() -> None:
    models: tuple[Any, ...] = (ChatRequest, CompletionRequest, ChatMessage, TextPart, StreamOptions)
    models += (TokenizeRequest, DetokenizeRequest, SessionRequest, ForkRequest)
    fields = {name for model in models for name in model.model_fields}
    assert fields == ALLOWED.keys()


def test_session_longer_than_any_context_is_refused() -> None:
    with pytest.raises(ApiError, match=r"max_length: must be a whole number from 2 to 2147483647"):
        parse_body(SessionRequest, {"model": "m", "max_length": 1 << 31})


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": None, "refusal": "no"}, "content"),
        ({"role": "user", "content": "a", "refusal": "no"}, "refusal"),
        ({"role": "assistant", "content": "a", "refusal": "no"}, "refusal"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "refusal": "no"}]},
            "content[0].refusal",
        ),
        ({"role": "system"}, "content"),
        ({"role": "tool", "tool_call_id": "1"}, "content"),
        ({"role": "assistant"}, "content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "content"),
        ({"role": "user", "content": []}, "content"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "content[0].text"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "text": "no"}]},
            "content[0].refusal",
        ),
    ],
)
def test_message_without_content_is_refused(message: dict[str, Any], path: str) -> None:
    error = find_refusal(SMALL | {"messages": [{"role": "user", "content": "hi"}, message]})
    assert (error.code, error.param) == (Code.INVALID_REQUEST, f"messages[1].{path}")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": ""}, ""),
        ({"role": "assistant", "content": None, "refusal": "I will not."}, "I will not."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
    ],
)
def test_message_needs_no_other_text(message: dict[str, Any], text: str) -> None:
    prompt = parse_chat(SMALL | {"messages": [message]}).to_generation_request().prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0]["content"] == text


def test_long_values_are_not_repeated_in_errors() -> None:
    for value in ("x" * 10_000, ["x" * 10_000], {"x": "y" * 10_000}, int("9" * 4000)):
        error = find_refusal(SMALL | {"temperature": value})
        assert len(error.message) < 200


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
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    prompt = parse_chat(SMALL | {"messages": messages}).to_generation_request().prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]


def test_template_variables_are_passed_through() -> None:
    extras = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    prompt = parse_chat(SMALL | extras).to_generation_request().prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.variables == {"enable_thinking": False, "reasoning_effort": "low"}


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools", "bos_token"])
def test_template_variable_of_the_gateway_is_refused(name: str) -> None:
    error = find_refusal(SMALL | {"chat_template_kwargs": {name: False}})
    assert error.param == f"chat_template_kwargs.{name}"
    assert "the gateway sets this variable" in error.message


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
    ("prompt", "expected"),
    [
        (["x", "y"], [TextPrompt("x"), TextPrompt("y")]),
        ([[1], [2, 3]], [TokenPrompt((1,)), TokenPrompt((2, 3))]),
    ],
)
def test_list_of_prompts_makes_a_request_of_each(prompt: object, expected: list[object]) -> None:
    body = {"model": "m", "prompt": prompt, "seed": 3}
    requests = parse_completion(body).to_generation_requests()
    assert [request.prompt for request in requests] == expected
    assert [request.prompt_field for request in requests] == ["prompt[0]", "prompt[1]"]
    assert {request.options.seed for request in requests} == {3}


@pytest.mark.parametrize("prompt", [5, [], ["a", [1]], [-1], [1, "a"], [True], {}, [1.5]])
def test_invalid_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion({"model": "m", "prompt": prompt}).to_generation_request()
    assert (caught.value.param or "").startswith("prompt")
    assert caught.value.mapping.status == 400


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the body is empty"),
        (b" ", "the body is empty"),
        (b"{", "not valid JSON: Expecting property name .* at line 1, column 2"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "more than 4300 digits"),
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
