"""Requests of api.proto: each field has an effect on what is generated, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.fields.openai import COMPLETIONS
from modelswarm_gateway.api.grpc.requests import (
    count_answers,
    parse_generate_request,
    parse_tokenize_request,
)
from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.generation.grammar.request_fields import GRAMMAR_FIELDS
from modelswarm_gateway.generation.request import ChatPrompt

BASE: dict[str, Any] = {"model": "m", "prompt": "x"}
NAMED: dict[str, Any] = {**BASE, "session_id": "s"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHOSEN = ("chat", "tokens", "hidden_states")  # in place of the prompt
# Field of GenerateRequest -> a request without it, and a value that changes what is generated.
FIELDS: dict[str, tuple[dict[str, Any], Any]] = {
    "model": (BASE, "other"),
    "prompt": (BASE, "other"),
    "chat": (BASE, CHAT),
    "tokens": (BASE, {"ids": [5]}),
    "hidden_states": (BASE, {"dtype": "float32", "shape": [1, 1], "data": bytes(4)}),
    "max_tokens": (BASE, 7),
    "sampling": (BASE, {"temperature": 0.5}),
    "stop": (BASE, ["end"]),
    "session_id": (BASE, "s"),
    "ignore_eos": (BASE, True),
    "resume_after": ({**NAMED, "resume_mark": "0123abcd"}, 9),
    "resume_mark": ({**NAMED, "resume_after": 9, "resume_mark": "0123abcd"}, "abcd0123"),
    "append": (NAMED, True),
    "session_position": ({**NAMED, "append": True}, 4),
    "logprobs": (BASE, 3),
    "echo": (BASE, True),
    "structured_outputs": (BASE, {"regex": "a"}),
    "add_special_tokens": (BASE, False),
    "prompt_logprobs": (BASE, 2),
    "skip_special_tokens": (BASE, False),
    "include_stop_str_in_output": (BASE, True),
    "truncate_prompt_tokens": (BASE, 5),
    "truncation_side": ({**BASE, "truncate_prompt_tokens": 5}, "right"),
    "return_logits": (BASE, True),
    "return_hidden_states": (BASE, True),
    "all_positions": ({**BASE, "return_logits": True}, True),
    "rows_after": ({**BASE, "return_logits": True}, 4),
    "blocks": (NAMED, {"first": 1, "last": 2}),
    "num_beams": (BASE, 3),
    "use_beam_search": (BASE, True),
    "length_penalty": ({**BASE, "num_beams": 3}, 2.0),
    "early_stopping": ({**BASE, "num_beams": 3}, "never"),
}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "seed": -5,
    "typical_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "no_repeat_ngram_size": 3,
    "min_tokens": 3,
    "logit_bias": {5: 1.5},
    "bad_words": ["no"],
    "bad_words_ids": [{"ids": [5, 6]}],
    "stop_token_ids": [5],
    "allowed_token_ids": [5],
}
TAG = '{"structures": [{"begin": "<n>", "schema": {}, "end": "</n>"}], "triggers": ["<n>"]}'
OUTPUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({}, "{}"),
    "regex": ({}, "a"),
    "choice": ({}, ["a", "b"]),
    "grammar": ({}, 'start: "a"'),
    "json_object": ({}, True),
    "structural_tag": ({}, TAG),
    "whitespace_pattern": ({"json": "{}"}, "[ ]"),
    "disable_any_whitespace": ({"json": "{}"}, False),
}
MESSAGES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "other"}],
    "add_generation_prompt": False,
    "chat_template_kwargs": '{"mood": "calm"}',
    "continue_final_message": True,
    "documents": ['{"title": "a"}'],
}


def names_of(message: Any) -> set[str]:
    return set(message.DESCRIPTOR.fields_by_name)


def parse(**fields: Any) -> Any:
    return parse_generate_request(api_pb2.GenerateRequest(**fields))


def test_lists_of_this_file_are_complete() -> None:
    assert names_of(api_pb2.GenerateRequest) == {*FIELDS, "n", "return_prompt_token_ids"}
    assert names_of(api_pb2.Sampling) == set(SAMPLING)
    assert names_of(api_pb2.StructuredOutputs) == set(OUTPUTS)
    assert names_of(api_pb2.Messages) == set(MESSAGES)


# Fields of `POST /v1/completions` that gRPC has in another form, or needs not.
OTHER_FORM = {
    "stream": "GenerateStream",
    "stream_options": "the last part has the usage",
    "return_token_ids": "token_ids, return_prompt_token_ids",
    "return_tokens_as_token_ids": "token_id",
    **dict.fromkeys((*GRAMMAR_FIELDS, "guided_whitespace_pattern"), "structured_outputs"),
}


def test_every_obeyed_field_of_completions_is_in_api_proto() -> None:
    own = names_of(api_pb2.GenerateRequest) | names_of(api_pb2.Sampling)
    assert COMPLETIONS.obeyed - own - set(OTHER_FORM) == set()


@pytest.mark.parametrize("name", FIELDS)
def test_field_changes_what_is_generated(name: str) -> None:
    without, value = FIELDS[name]
    given = {key: part for key, part in without.items() if key != "prompt" or name not in CHOSEN}
    assert parse(**{**given, name: value}) != parse(**without)


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_field_changes_the_sampling(name: str) -> None:
    changed = parse(**BASE, sampling={name: SAMPLING[name]}).options
    assert changed != parse(**BASE).options
    assert getattr(changed, name) not in (None, ())


@pytest.mark.parametrize("name", OUTPUTS)
def test_field_of_structured_outputs_changes_the_grammar(name: str) -> None:
    without, value = OUTPUTS[name]
    changed = parse(**BASE, structured_outputs={**without, name: value}).grammar
    assert changed is not None
    assert changed != parse(**BASE, structured_outputs=without).grammar


@pytest.mark.parametrize("name", MESSAGES)
def test_field_of_a_chat_changes_the_prompt(name: str) -> None:
    changed = parse(model="m", chat={**CHAT, name: MESSAGES[name]}).prompt
    assert isinstance(changed, ChatPrompt)
    assert changed != parse(model="m", chat=CHAT).prompt
    chat: Any = {**CHAT, name: MESSAGES[name]}
    asked = api_pb2.TokenizeRequest(model="m", chat=chat)
    assert parse_tokenize_request(asked).to_generation_request().prompt == changed


def test_tool_calls_of_a_conversation_reach_the_template() -> None:
    call = {"id": "c1", "name": "add", "arguments": "{}"}
    messages = [
        {"role": "user", "content": "hi", "name": "ada"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    prompt = parse(model="m", chat={"messages": messages}).prompt
    assert isinstance(prompt, ChatPrompt)
    first, second, third = prompt.messages
    assert first["name"] == "ada"
    function = {"name": "add", "arguments": "{}"}
    assert second["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert third["tool_call_id"] == "c1"


def test_number_of_answers_is_one_unless_it_is_given() -> None:
    assert count_answers(api_pb2.GenerateRequest(**BASE)) == 1
    assert count_answers(api_pb2.GenerateRequest(**BASE, n=3)) == 3


def test_field_of_a_step_is_that_of_a_request() -> None:
    assert names_of(api_pb2.SessionStep) <= names_of(api_pb2.GenerateRequest)


@pytest.mark.parametrize(
    ("chat", "place"),
    [
        ({}, "chat.messages"),
        ({**CHAT, "documents": ["{"]}, "chat.documents[0]"),
        ({**CHAT, "documents": ["3"]}, "chat.documents[0]"),
        ({**CHAT, "chat_template_kwargs": "[]"}, "chat.chat_template_kwargs"),
        ({**CHAT, "chat_template_kwargs": '{"tools": []}'}, "chat.chat_template_kwargs.tools"),
        ({"messages": [{"content": "x"}]}, "chat.messages[0].role"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "add"}]}]},
            "chat.messages[0].tool_calls[0].id",
        ),
    ],
)
def test_wrong_part_of_a_chat_is_named(chat: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(model="m", chat=chat)
    assert refused.value.param == place
    assert refused.value.message.startswith(place.split("[")[0])
