"""Anthropic's requests as generation requests, and the sentences for those that are wrong."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from anthropic import types
from anthropic.types import beta

from modelswarm_gateway.api.fields import messages as fields
from modelswarm_gateway.api.fields.states import FieldTable
from modelswarm_gateway.api.messages.conversation import read_conversation
from modelswarm_gateway.api.messages.partial_json import read_arguments
from modelswarm_gateway.api.messages.requests import parse_messages
from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.generation.request import ChatPrompt
from modelswarm_gateway.generation.tool_calls.answer import ToolChoice

HI = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [HI]}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]}
CALLED = {"role": "assistant", "content": [CALL]}
PREFILL = {"role": "assistant", "content": "so"}


def test_blocks_become_messages_of_the_template() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    answer = {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}, CALL]}
    reply = {"role": "user", "content": [RESULT, {"type": "text", "text": "go"}]}
    function = {"name": "f", "arguments": '{"x": "é"}'}
    assert read_conversation([{"type": "text", "text": "S"}], [HI, answer, reply, HI]) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "user", "content": "go\nhi"},
    ]


def test_reasoning_whose_text_was_left_out_is_none() -> None:
    thought = {"type": "thinking", "thinking": "", "signature": "s"}
    answer = {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}
    assert read_conversation(None, [HI, answer, HI])[1] == {"role": "assistant", "content": "a"}


def test_null_of_a_schema_means_that_it_is_left_out() -> None:
    schema = {"type": "object", "properties": None, "required": None}
    asked = parse_messages({**BODY, "tools": [{**TOOL, "input_schema": schema}]})
    answer = asked.to_generation_request().answer
    assert answer is not None and answer.tools[0].parameters == {"type": "object"}


def test_neighbouring_messages_of_the_assistant_are_one_answer() -> None:
    """Clients that keep each block as a message send its calls, and the text behind them, in several ones."""
    second = {"role": "assistant", "content": [{**CALL, "id": "2"}]}
    results = {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "2"}]}
    answer, *others = read_conversation(None, [HI, CALLED, PREFILL, second, results])[1:]
    assert (answer["content"], [call["id"] for call in answer["tool_calls"]]) == ("so", ["1", "2"])
    assert [other["role"] for other in others] == ["tool", "tool"]
    split = {"role": "user", "content": [RESULT]}
    with pytest.raises(ApiError, match="the call '2'"):
        read_conversation(None, [HI, CALLED, second, split, PREFILL])


def test_last_message_of_the_assistant_is_continued() -> None:
    asked = parse_messages({**BODY, "messages": [HI, PREFILL], "thinking": {"type": "disabled"}})
    prompt = asked.to_generation_request().prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.continues and prompt.variables["add_generation_prompt"] is False
    assert prompt.messages[-1] == {"role": "assistant", "content": "so"}


def test_fields_become_options() -> None:
    asked = parse_messages(
        {
            **BODY,
            "tools": [TOOL],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "disabled"},
            "output_config": {"effort": "low"},
            "top_k": 3,
        }
    ).to_generation_request()
    assert asked.answer is not None and asked.answer.tools[0].description == "d"
    assert (asked.answer.choice, asked.answer.name) == (ToolChoice.NAMED, "f")
    assert asked.answer.one_call and not asked.answer.include_reasoning
    assert (asked.options.max_tokens, asked.options.top_k) == (5, 3)
    assert isinstance(asked.prompt, ChatPrompt)
    off = {"enable_thinking": False, "thinking": False}
    assert asked.prompt.variables == {**off, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "this field is required"),
        ({"messages": []}, "messages", "a list of at least one message"),
        ({"messages": [{**HI, "role": "tool"}]}, "messages[0].role", '"user", "assistant"'),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{**HI, "content": []}]}, "messages[0].content", "the list is empty"),
        ({"messages": [{**HI, "content": [1]}]}, "messages[0].content[0]", "an object"),
        (
            {"messages": [{**HI, "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text",
            "must be a string",
        ),
        (
            {"messages": [{**HI, "content": [{"type": "document"}]}]},
            "messages[0].content[0].type",
            "document blocks are not supported",
        ),
        (
            {"messages": [{**HI, "content": [CALL]}]},
            "messages[0].content[0].type",
            "tool_use does not belong here",
        ),
        ({"messages": [HI, CALLED]}, "messages[1].content[0]", "no tool_result block"),
        ({"messages": [HI, CALLED, HI]}, "messages[1].content[0]", "no tool_result block"),
        (
            {"messages": [HI, {**CALLED, "content": [CALL, CALL]}]},
            "messages[1].content[1].id",
            "two blocks have the id '1'",
        ),
        (
            {"messages": [HI, {**CALLED, "content": [{**CALL, "input": "{}"}]}]},
            "messages[1].content[0].input",
            "must be an object",
        ),
        (
            {"messages": [{**HI, "content": [RESULT]}]},
            "messages[0].content[0].tool_use_id",
            "'1' is no tool_use block",
        ),
        (
            {"messages": [HI, {"role": "assistant", "content": []}]},
            "messages[1].content",
            "has no text",
        ),
        (
            {"messages": [HI, {"role": "assistant", "content": "so "}]},
            "messages[1].content",
            "white space",
        ),
        (
            {"messages": [HI, PREFILL], "thinking": {"type": "adaptive"}},
            "thinking",
            "end with a message of the user",
        ),
        (
            {"messages": [HI, PREFILL], "tools": [TOOL], "tool_choice": {"type": "any"}},
            "tool_choice",
            "a forced call",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type", "allowed: text"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "required"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "not 'a b'"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "defined twice"),
        ({"tools": [{**TOOL, "strict": 1}]}, "tools[0].strict", "true or false"),
        ({"tools": [{**TOOL, "description": 1}]}, "tools[0].description", "a string"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}]},
            "tools[0].type",
            "web_search_20250305 is not supported",
        ),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "auto, any, tool, none"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type", "needs tools"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", "name of a tool"),
        ({"tool_choice": {"type": "auto", "name": "g"}}, "tool_choice.name", "only a choice"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
            "true or false",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking.type", "adaptive"),
        ({"thinking": {"type": "on"}}, "thinking.type", '"adaptive" or "disabled"'),
        ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display", "summarized"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            "thinking.budget_tokens",
            "not limited",
        ),
        ({"output_config": {"effort": 1}}, "output_config.effort", "a string"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format.type", "json_schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": 1}}},
            "output_config.format.schema",
            "must be a JSON object",
        ),
        ({"stop_sequences": "a"}, "stop_sequences", "a list of at most 16 strings"),
        ({"temperature": 3}, "temperature", "from 0 to 2, not 3"),
        ({"stop_sequence": ["a"]}, "stop_sequence", "did you mean stop_sequences?"),
    ],
)
def test_wrong_requests_are_refused_by_name(
    changes: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ApiError) as refused:
        parse_messages({**BODY, **changes}).to_generation_request()
    assert refused.value.param == param
    assert words in refused.value.message


HEADERS = {"betas", "user_profile_id", "workspace_id"}  # which the client sends as headers
TYPES: list[tuple[FieldTable, list[Any]]] = [
    (
        fields.MESSAGES,
        [
            types.message_create_params.MessageCreateParamsStreaming,
            beta.message_create_params.MessageCreateParamsStreaming,
        ],
    ),
    (
        fields.COUNT_TOKENS,
        [types.MessageCountTokensParams, beta.MessageCountTokensParams],
    ),
    (fields.INPUT_MESSAGE, [*typing.get_args(types.MessageParam)]),
    (fields.TEXT_BLOCK, [types.TextBlockParam, beta.BetaTextBlockParam]),
    (fields.THINKING_BLOCK, [types.ThinkingBlockParam, beta.BetaThinkingBlockParam]),
    (fields.TOOL_USE_BLOCK, [types.ToolUseBlockParam, beta.BetaToolUseBlockParam]),
    (fields.TOOL_RESULT_BLOCK, [types.ToolResultBlockParam, beta.BetaToolResultBlockParam]),
    (fields.ANTHROPIC_TOOL, [types.ToolParam, beta.BetaToolParam]),
    (
        fields.ANTHROPIC_TOOL_CHOICE,
        [
            types.ToolChoiceAutoParam,
            types.ToolChoiceAnyParam,
            types.ToolChoiceToolParam,
            types.ToolChoiceNoneParam,
        ],
    ),
    (
        fields.THINKING,
        [
            types.ThinkingConfigEnabledParam,
            types.ThinkingConfigDisabledParam,
            beta.BetaThinkingConfigAdaptiveParam,
        ],
    ),
    (fields.OUTPUT_CONFIG, [types.OutputConfigParam, beta.BetaOutputConfigParam]),
    (fields.OUTPUT_FORMAT, [types.JSONOutputFormatParam]),
]


@pytest.mark.parametrize(
    ("table", "kinds"), TYPES, ids=lambda value: getattr(value, "of", "") or None
)
def test_every_field_of_the_anthropic_client_is_in_its_table(
    table: FieldTable, kinds: list[Any]
) -> None:
    names = {name for kind in kinds for name in typing.get_type_hints(kind)}
    assert names
    assert names - HEADERS - table.states.keys() == set()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1, "b": [1, 2', {"a": 1, "b": [1]}),
        ('{"a": {"b": "x,}"}, "c": "\\"', {"a": {"b": "x,}"}}),
        ('{"a', {}),
        ("[1]", {}),
        ("no JSON", {}),
        ('{"a": [[1, {"b": ', {"a": [[1, {}]]}),
    ],
)
def test_arguments_that_were_cut_off_are_read_as_far_as_they_go(
    text: str, value: dict[str, Any]
) -> None:
    assert read_arguments(text) == value
