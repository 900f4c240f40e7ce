"""Tables of fields: complete, true to the models of requests, and what a request with each field gets."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types import chat, completion_create_params, shared_params
from openai.types.chat import completion_create_params as chat_create_params
from transformers import GenerationConfig

from modelswarm_gateway.api.fields import formats, tools
from modelswarm_gateway.api.fields.openai import (
    CHAT,
    COMPLETIONS,
    CONTENT_PART,
    MESSAGE,
    STREAM_OPTIONS,
    TABLES,
)
from modelswarm_gateway.api.fields.states import FieldError, FieldTable, Refused, Renamed
from modelswarm_gateway.api.http.openai_requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    TextPart,
    parse_chat,
    parse_completion,
)
from modelswarm_gateway.api.http.sessions import ForkRequest, SessionRequest
from modelswarm_gateway.api.tokenization import DetokenizeRequest, TokenizeRequest
from modelswarm_gateway.errors import ApiError, Code
from tools.ci.make_fields_page import PAGE, render_page

MODELS = (
    SessionRequest,
    ForkRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ChatRequest,
    CompletionRequest,
    ChatMessage,
    TextPart,
    StreamOptions,
)
MESSAGES = [{"role": "user", "content": "hi"}]
ODD = {"odd": ["value"]}  # a value that is harmless for no field

MESSAGE_TYPES = (
    chat.ChatCompletionAssistantMessageParam,
    chat.ChatCompletionDeveloperMessageParam,
    chat.ChatCompletionFunctionMessageParam,
    chat.ChatCompletionSystemMessageParam,
    chat.ChatCompletionToolMessageParam,
    chat.ChatCompletionUserMessageParam,
)
PART_TYPES = (
    chat.ChatCompletionContentPartImageParam,
    chat.ChatCompletionContentPartInputAudioParam,
    chat.ChatCompletionContentPartRefusalParam,
    chat.ChatCompletionContentPartTextParam,
)


def refusal_of(body: dict[str, Any]) -> ApiError:
    parse = parse_completion if "prompt" in body else parse_chat
    with pytest.raises(ApiError) as caught:
        parse({"model": "m", **body})
    assert caught.value.mapping.status == 400
    return caught.value


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_obeyed_fields_are_those_of_the_request_model(model: Any) -> None:
    assert model.table.obeyed == model.model_fields.keys()


@pytest.mark.parametrize(
    "table", (*TABLES, *tools.TOOL_TABLES, *formats.FORMAT_TABLES), ids=lambda table: table.of
)
def test_field_has_one_state_in_a_table(table: FieldTable) -> None:
    names = [name for section in table.sections.values() for name in section]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


@pytest.mark.parametrize(
    ("table", "types"),
    [
        (CHAT, [chat_create_params.CompletionCreateParamsStreaming]),
        (CHAT, [chat_create_params.CompletionCreateParamsNonStreaming]),
        (COMPLETIONS, [completion_create_params.CompletionCreateParamsStreaming]),
        (MESSAGE, MESSAGE_TYPES),
        (CONTENT_PART, PART_TYPES),
        (STREAM_OPTIONS, [chat.ChatCompletionStreamOptionsParam]),
        (tools.TOOL, [chat.ChatCompletionFunctionToolParam, chat.ChatCompletionCustomToolParam]),
        (tools.FUNCTION, [shared_params.FunctionDefinition]),
        (
            tools.TOOL_CHOICE,
            [
                chat.ChatCompletionNamedToolChoiceParam,
                chat.ChatCompletionNamedToolChoiceCustomParam,
                chat.ChatCompletionAllowedToolChoiceParam,
            ],
        ),
        (tools.ALLOWED_TOOLS, [chat.ChatCompletionAllowedToolsParam]),
        (
            tools.TOOL_CALL,
            [
                chat.ChatCompletionMessageFunctionToolCallParam,
                chat.ChatCompletionMessageCustomToolCallParam,
            ],
        ),
        (
            formats.TEXT_FORMAT,
            [shared_params.ResponseFormatText, shared_params.ResponseFormatJSONObject],
        ),
        (formats.SCHEMA_FORMAT, [shared_params.ResponseFormatJSONSchema]),
        (formats.JSON_SCHEMA, [shared_params.response_format_json_schema.JSONSchema]),
    ],
)
def test_every_field_of_the_openai_client_is_in_its_table(
    table: FieldTable, types: list[type]
) -> None:
    fields = {name for kind in types for name in typing.get_type_hints(kind)}
    assert fields - table.states.keys() == set()


def test_every_field_of_generation_config_is_in_the_tables() -> None:
    config = GenerationConfig()  # type: ignore[no-untyped-call]
    fields = {name for name in vars(config) if not name.startswith("_")}
    assert fields - CHAT.states.keys() == set()
    assert fields - COMPLETIONS.states.keys() == set()


def test_chat_and_completions_know_the_fields_of_each_other() -> None:
    assert CHAT.states.keys() == COMPLETIONS.states.keys()


@pytest.mark.parametrize(
    "table", (*TABLES, *tools.TOOL_TABLES, *formats.FORMAT_TABLES), ids=lambda table: table.of
)
def test_refused_field_is_refused_unless_its_value_is_harmless(table: FieldTable) -> None:
    for name, state in table.states.items():
        if not isinstance(state, Refused):
            continue
        assert table.take({name: None}) == {}
        for value in state.harmless:
            assert table.take({name: value}) == {}, name
        with pytest.raises(FieldError, match=r"leave it out or send") as refusal:
            table.take({name: ODD})
        assert (refusal.value.field, refusal.value.code) == (name, Code.UNSUPPORTED)
        assert state.reason in refusal.value.problem


def test_other_name_names_a_field_of_the_same_table() -> None:
    for table in TABLES:
        for state in table.states.values():
            assert not isinstance(state, Renamed) or state.name in table.states


@pytest.mark.parametrize(
    ("body", "param", "hint"),
    [
        ({"messages": MESSAGES, "temprature": 1}, "temprature", "did you mean temperature?"),
        ({"messages": MESSAGES, "maxTokens": 5}, "maxTokens", "did you mean max_tokens?"),
        ({"prompt": "x", "sed": 1}, "sed", "did you mean seed?"),
        ({"prompt": "x", "zzz": 1}, "zzz", "leave it out"),
        (
            {"prompt": "x", "stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "did you mean include_usage?",
        ),
        (
            {"messages": [MESSAGES[0] | {"contnt": "x"}]},
            "messages[0].contnt",
            "unknown field of a message; did you mean content?",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]},
            "messages[0].content[0].txt",
            "did you mean text?",
        ),
    ],
)
def test_unknown_field_is_refused_with_the_nearest_name(
    body: dict[str, Any], param: str, hint: str
) -> None:
    error = refusal_of(body)
    assert (error.code, error.param) == (Code.UNKNOWN_PARAMETER, param)
    assert error.message.startswith(f"{param}: unknown field of ")
    assert hint in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "image_url",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "audio"),
        ({"prompt": "x", "messages": MESSAGES}, "messages"),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "do_sample": True}, "do_sample"),
        ({"messages": MESSAGES, "adapter": "a"}, "adapter"),
        ({"messages": MESSAGES, "priority": 1}, "priority"),
    ],
)
def test_known_field_that_is_not_supported_is_refused_by_name(
    body: dict[str, Any], param: str
) -> None:
    error = refusal_of(body)
    assert error.code is Code.UNSUPPORTED
    assert error.param is not None and error.param.split(".")[-1] == param


def test_page_of_fields_is_the_generated_one() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == render_page(), "run python tools/ci/make_fields_page.py"


def test_long_name_of_an_unknown_field_is_not_repeated() -> None:
    error = refusal_of({"prompt": "x", "y" * 100_000: 1})
    assert len(error.message) < 250
