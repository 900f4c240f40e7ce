"""Bodies of `POST /v1/responses`: items become messages, fields have their effects, everything else is refused."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types import responses, shared_params
from openai.types.responses import response_create_params, response_input_item_param

from modelswarm_gateway.api.fields import responses as fields
from modelswarm_gateway.api.fields.states import FieldError, FieldTable, Refused
from modelswarm_gateway.api.responses.requests import (
    RESPONSES_ALLOWED,
    ResponsesBody,
    parse_responses,
)
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.grammar.source import GrammarKind
from modelswarm_gateway.generation.request import ChatPrompt, GenerationRequest
from modelswarm_gateway.generation.tool_calls.answer import ToolChoice

ODD = {"odd": ["value"]}  # harmless for no field
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": False}


def allowed(name: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "name": name}]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def request_of(*before: Any, **body: Any) -> GenerationRequest:
    return parse_responses({"model": "m", "input": "hi", **body}).whole(before)


def messages_of(value: Any, **body: Any) -> list[Any]:
    prompt = request_of(input=value, **body).prompt
    assert isinstance(prompt, ChatPrompt)
    return list(prompt.messages)


def refusal_of(*before: Any, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        request_of(*before, **body)
    assert caught.value.mapping.status == 400
    return caught.value


def test_text_and_instructions_become_messages() -> None:
    assert messages_of("hi", instructions="be brief") == [
        {"role": "system", "content": "be brief"},
        USER,
    ]


def test_items_become_one_chat() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "think"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
        {**CALL, "id": "fc_1", "status": "completed"},
        OUTPUT,
        {**CALL, "call_id": "c2"},
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ]  # fmt: skip

    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    assert messages_of(items) == [
        {"role": "system", "content": "a"},
        USER,
        {"role": "assistant", "content": "b", "reasoning_content": "think", "tool_calls": [call("c1")]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": [call("c2")]},
        {"role": "tool", "content": "sun", "tool_call_id": "c2"},
    ]  # fmt: skip


def test_null_in_an_item_means_unset() -> None:
    assert messages_of([{**USER, "type": None, "id": None, "phase": None}]) == [USER]


def test_answer_that_goes_on_behind_a_call_is_one_message() -> None:
    """The model's own order of items: its text is behind the call, and the outputs are behind both."""
    thought = {"type": "reasoning", "summary": [], "content": [
        {"type": "reasoning_text", "text": "hm"}]}  # fmt: skip
    text = {"type": "message", "role": "assistant", "content": "I wait."}
    second = {**CALL, "call_id": "c2"}
    items = [USER, CALL, text, thought, second, {**OUTPUT, "call_id": "c2"}, OUTPUT]
    for before in range(len(items)):
        prompt = request_of(*items[:before], input=items[before:]).prompt
        assert isinstance(prompt, ChatPrompt)
        asked, called, *outputs = prompt.messages
        assert asked == USER
        assert (called["content"], called["reasoning_content"]) == ("I wait.", "hm")
        assert [call["id"] for call in called["tool_calls"]] == ["c1", "c2"]
        assert [output["tool_call_id"] for output in outputs] == ["c2", "c1"]


def test_items_of_earlier_responses_come_first() -> None:
    answer = {"type": "message", "role": "assistant", "content": "yes"}
    prompt = request_of(USER, answer, input="more").prompt
    assert isinstance(prompt, ChatPrompt)
    assert [message["content"] for message in prompt.messages] == ["hi", "yes", "more"]


def test_output_of_a_call_may_be_appended_alone() -> None:
    request = parse_responses({"model": "m", "input": [OUTPUT]})
    prompt = request.appended().prompt
    assert isinstance(prompt, ChatPrompt)
    assert [message["role"] for message in prompt.messages] == ["tool"]
    assert refusal_of(input=[OUTPUT]).param == "input[0].call_id"


def test_fields_reach_the_generation() -> None:
    request = request_of(
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=7,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        reasoning={"effort": "low"},
        text={"format": JSON_FORMAT},
    )
    options = request.options
    assert (options.max_tokens, options.temperature, options.top_p) == (5, 0.5, 0.9)
    assert (options.top_k, options.seed, options.logprobs) == (3, 7, 2)
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.variables == {"reasoning_effort": "low"}
    assert request.grammar is not None and request.grammar.kind is GrammarKind.JSON_SCHEMA


def test_tools_reach_the_generation() -> None:
    answer = request_of(tools=[TOOL], parallel_tool_calls=False).answer
    assert answer is not None and answer.one_call
    assert [tool.name for tool in answer.tools] == ["f"]
    assert request_of(parallel_tool_calls=False).answer is not None
    some = request_of(tools=[TOOL], tool_choice=allowed("f", "required")).answer
    assert some is not None
    assert (some.choice, some.allowed) == (ToolChoice.REQUIRED, ("f",))
    named = request_of(tools=[TOOL], tool_choice={"type": "function", "name": "f"}).answer
    assert named is not None and (named.choice, named.name) == (ToolChoice.NAMED, "f")
    none = request_of(tools=[TOOL], tool_choice="none").answer
    assert none is not None and none.tools == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["text"]}, "input[0]"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "refusal": ""}]}
                ]
            },
            "input[0].content[0].refusal",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": "x", "contnt": "y"}]}, "input[0].contnt"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [USER, CALL]}, "input[1]"),
        ({"input": [USER, CALL, USER]}, "input[1]"),
        ({"input": [{**CALL, "name": ""}]}, "input[0].name"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [USER, OUTPUT]}, "input[1].call_id"),
        ({"input": [CALL, {**OUTPUT, "output": 5}]}, "input[1].output"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"model": ""}, "model"),
        ({"instructions": 5}, "instructions"),
        ({"instructions": [USER]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": [USER]}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"include": ["message.output_text.logprobs"], "tools": [TOOL]}, "include"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"store": "yes"}, "store"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object", "name": "x"}}}, "text.format.name"),
        ({"text": {"format": {**JSON_FORMAT, "name": "a b"}}}, "text.format.name"),
        ({"text": {"format": {**JSON_FORMAT, "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {**JSON_FORMAT, "strict": 5}}}, "text.format.strict"),
        ({"text": {"format": JSON_FORMAT}, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "function": {}}]}, "tools[0].function"),
        (
            {"tools": [{**TOOL, "parameters": {"type": "array"}}]},
            "tools[0].parameters.type",
        ),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"tools": [TOOL], "tool_choice": allowed("g")}, "tool_choice.tools[0]"),
        ({"tools": [TOOL], "tool_choice": allowed("f", mode="never")}, "tool_choice.mode"),
        ({"tools": [TOOL], "tool_choice": {**allowed("f"), "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_bad_input_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    error = refusal_of(**body)
    assert error.param == param, error.message
    assert param in error.message
    assert "response_format" not in error.message


def test_unanswered_call_of_an_earlier_response_is_named() -> None:
    assert refusal_of(CALL, input="more").param == "previous_response_id"


@pytest.mark.parametrize("table", fields.TABLES, ids=lambda table: table.of)
def test_every_field_has_words_and_one_state(table: FieldTable) -> None:
    names = [name for section in table.sections.values() for name in section]
    assert len(names) == len(set(names))
    assert table.obeyed - RESPONSES_ALLOWED.keys() == set()
    for name, state in table.states.items():
        if isinstance(state, Refused):
            with pytest.raises(FieldError) as refusal:
                table.take({name: ODD})
            assert (refusal.value.field, refusal.value.code) == (name, Code.UNSUPPORTED)
            for value in state.harmless:
                assert table.take({name: value}) == {}


def test_obeyed_fields_are_those_of_the_model() -> None:
    assert fields.RESPONSES.obeyed == ResponsesBody.model_fields.keys()


@pytest.mark.parametrize(
    ("table", "types"),
    [
        (fields.RESPONSES, [response_create_params.ResponseCreateParamsStreaming]),
        (fields.STREAM_OPTIONS, [response_create_params.StreamOptions]),
        (fields.REASONING, [shared_params.Reasoning]),
        (fields.TEXT, [responses.ResponseTextConfigParam]),
        (fields.TEXT_FORMAT, [responses.ResponseFormatTextJSONSchemaConfigParam]),
        (fields.TOOL, [responses.FunctionToolParam]),
        (fields.TOOL_CHOICE, [responses.ToolChoiceFunctionParam]),
        (
            fields.MESSAGE,
            [
                responses.EasyInputMessageParam,
                response_input_item_param.Message,
                responses.ResponseOutputMessageParam,
            ],
        ),
        (
            fields.PART,
            [
                responses.ResponseInputTextParam,
                responses.ResponseOutputTextParam,
                responses.ResponseOutputRefusalParam,
            ],
        ),
        (fields.FUNCTION_CALL, [responses.ResponseFunctionToolCallParam]),
        (fields.FUNCTION_CALL_OUTPUT, [response_input_item_param.FunctionCallOutput]),
        (fields.REASONING_ITEM, [responses.ResponseReasoningItemParam]),
    ],
    ids=lambda value: value.of if isinstance(value, FieldTable) else "",
)
def test_every_field_of_the_openai_client_is_in_its_table(
    table: FieldTable, types: list[type]
) -> None:
    names = {name for kind in types for name in typing.get_type_hints(kind)}
    assert names - table.states.keys() == set()
