"""Tools of a request are read as a whole, or refused with the path of what contradicts itself."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.lib._parsing import parse_chat_completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from typing_extensions import override

from modelswarm_gateway.api.http.openai_requests import parse_chat
from modelswarm_gateway.api.tools.deltas import chat_delta, chat_message
from modelswarm_gateway.api.tools.messages import check_conversation
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.request import ChatPrompt, fit_to_format
from modelswarm_gateway.generation.tool_calls.answer import (
    AnswerOptions,
    AnswerParser,
    ToolChoice,
    has_events,
)
from modelswarm_gateway.generation.tool_calls.events import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from modelswarm_gateway.generation.tool_calls.families import (
    FAMILIES,
    NO_FORMAT,
    NO_PARSER,
    find_format,
)
from modelswarm_gateway.generation.tool_calls.tool import Tool

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
HERMES = find_format("{{ tools }}<tool_call>")


def tool(name: str = "f", **changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **changes}}


def call(name: str = "1", arguments: str = "{}") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}


def options_of(**changes: Any) -> AnswerOptions:
    answer = parse_chat({"model": "m", "messages": HI, **changes}).to_generation_request().answer
    assert answer is not None
    return answer


def refusal_of(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat({"model": "m", "messages": HI, **changes}).to_generation_request()
    assert caught.value.mapping.status == 400
    return caught.value


class City(BaseModel):
    """Type of the parsed calls and contents."""

    name: str


def test_answer_that_openais_client_has_parsed_is_read() -> None:
    """`runTools` of its JavaScript twin sends such messages back, too."""
    function = {"name": "City", "arguments": '{"name": "Bonn"}'}
    called = {"id": "1", "type": "function", "function": function}
    message = {"role": "assistant", "content": '{"name": "Ulm"}', "tool_calls": [called]}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    made = parse_chat_completion(
        response_format=City,
        input_tools=[openai.pydantic_function_tool(City)],
        chat_completion=ChatCompletion.construct(choices=[choice]),
    )
    sent = made.choices[0].message.model_dump(exclude_unset=True, mode="json", warnings=False)
    assert sent["parsed"] and sent["tool_calls"][0]["function"]["parsed_arguments"]
    result = {"role": "tool", "tool_call_id": "1", "content": "r"}
    asked = parse_chat({"model": "m", "messages": [*HI, sent, result]}).to_generation_request()
    assert isinstance(asked.prompt, ChatPrompt)
    assert asked.prompt.messages[1] == message


def test_tools_and_choice_are_read() -> None:
    given = options_of(tools=[tool(description="d"), tool("g")], tool_choice="auto")
    assert given.tools == (Tool("f", SCHEMA, "d"), Tool("g", SCHEMA))
    assert (given.choice, given.one_call) == (ToolChoice.AUTO, False)
    assert options_of(tools=[tool()], parallel_tool_calls=False).one_call
    assert options_of(tools=[tool()], tool_choice="none").tools == ()
    named = options_of(tools=[tool()], tool_choice={"type": "function", "function": {"name": "f"}})
    assert (named.choice, named.name) == (ToolChoice.NAMED, "f")
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    allowed = {"type": "allowed_tools", "allowed_tools": some}
    given = options_of(tools=[tool(), tool("g")], tool_choice=allowed)
    assert (given.choice, given.allowed) == (ToolChoice.REQUIRED, ("g",))
    assert [each.name for each in given.callable_tools] == ["g"]
    assert given.callable_tools[0].param == "tools[1].function.parameters"
    assert options_of(tools=[], tool_choice="none", include_reasoning=False) == AnswerOptions(
        choice=ToolChoice.NONE, include_reasoning=False
    )


def parameters(**schema: Any) -> dict[str, Any]:
    return {"tools": [tool(parameters={"type": "object", **schema})]}


def allowed_tools(**changes: Any) -> dict[str, Any]:
    some = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}], **changes}
    return {
        "tools": [tool()],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": some},
    }


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"tools": [5]}, "tools[0]", "list of objects"),
        ({"tools": {}}, "tools", "a list of objects"),
        ({"tools": [{"type": "x", "function": {}}]}, "tools[0].type", '"function"'),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "an object"),
        ({"tools": [tool("")]}, "tools[0].function.name", "a string"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name", "64"),
        ({"tools": [tool(), tool("g"), tool()]}, "tools[2].function.name", "twice"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", "true or false"),
        ({"tools": [tool(extra=1)]}, "tools[0].function.extra", "unknown field"),
        ({"tools": [tool(description=5)]}, "tools[0].function.description", "a string"),
        ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools", "at most 128"),
        ({"tools": [tool(description="x" * (256 << 10))]}, "tools", "256 KiB"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "a JSON schema"),
        (parameters(type="array"), "tools[0].function.parameters.type", '"object"'),
        (
            parameters(properties={"a": {"type": "strnig"}}),
            "tools[0].function.parameters.properties.a.type",
            "one of object",
        ),
        (
            parameters(properties={"a": {"anyOf": [{"minimum": 3, "maximum": 2}]}}),
            "tools[0].function.parameters.properties.a.anyOf[0].minimum",
            "no value fits",
        ),
        (
            parameters(properties={}, required=["a"], additionalProperties=False),
            "tools[0].function.parameters.required",
            "is required",
        ),
        (parameters(required="a"), "tools[0].function.parameters.required", "a list"),
        (
            parameters(properties={"a": {"enum": []}}),
            "tools[0].function.parameters.properties.a.enum",
            "not empty",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "any"}, "tool_choice", "none, auto, required"),
        ({"tool_choice": 5}, "tool_choice", "an object that names a function"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "not the name of a function in tools",
        ),
        (allowed_tools(mode="any"), "tool_choice.allowed_tools.mode", '"required"'),
        (allowed_tools(tools=[]), "tool_choice.allowed_tools.tools", "not empty"),
        (
            allowed_tools(tools=[{"type": "function", "function": {"name": "g"}}]),
            "tool_choice.allowed_tools.tools[0]",
            "not the name of a function in tools",
        ),
        (allowed_tools(extra=1), "tool_choice.allowed_tools.extra", "unknown field"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "needs tools"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ],
)
def test_contradicting_tools_are_refused_by_path(
    changes: dict[str, Any], param: str, words: str
) -> None:
    error = refusal_of(**changes)
    assert (error.param, words in error.message) == (param, True), error.message


def test_schemas_nested_too_deeply_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"type": "object", "properties": {"a": schema}}
    assert "64 deep" in refusal_of(tools=[tool(parameters=schema)]).message


ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [call("1"), call("2")]}


def answer(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": "x"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([ASSISTANT], "messages[1].tool_calls"),
        ([ASSISTANT, answer("1")], "messages[1].tool_calls"),
        ([ASSISTANT, answer("1"), *HI, answer("2")], "messages[1].tool_calls"),
        ([answer("1")], "messages[1].tool_call_id"),
        ([ASSISTANT, answer("1"), answer("3")], "messages[3].tool_call_id"),
        ([ASSISTANT, answer("1"), answer("1")], "messages[3].tool_call_id"),
        ([{"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ([{**ASSISTANT, "tool_calls": [call(), call()]}], "messages[1].tool_calls[1].id"),
        ([{**ASSISTANT, "tool_calls": [{"id": "1"}]}], "messages[1].tool_calls[0].function"),
        ([{"role": "user", "content": "x", "tool_calls": [call()]}], "messages[1].tool_calls"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages[1].tool_call_id"),
    ],
)
def test_calls_without_their_answers_are_refused(messages: list[Any], param: str) -> None:
    assert refusal_of(messages=[*HI, *messages]).param == param


class ComparedName(str):
    """The id of a call; counts how often it is compared."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    @override
    def __eq__(self, other: object) -> bool:
        ComparedName.compared += 1
        return str.__eq__(self, other)


def test_answers_of_many_calls_are_found_in_linear_time() -> None:
    """A body has room for 200,000 calls: minutes of the event loop, if each answer is compared with each call."""
    names = [ComparedName(number) for number in range(500)]
    asked = {"role": "assistant", "tool_calls": [{"id": name} for name in names]}
    answers = [{"role": "tool", "tool_call_id": ComparedName(name)} for name in reversed(names)]
    ComparedName.compared = 0
    check_conversation([asked, *answers], is_appended=False)
    assert ComparedName.compared < 20 * len(names)


def test_appended_messages_may_begin_with_answers() -> None:
    body = {"model": "m", "session_id": "s", "append": True}
    prompt = parse_chat({**body, "messages": [answer("1"), *HI]}).given_prompt()[1]
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0]["tool_call_id"] == "1"
    with pytest.raises(ApiError):
        parse_chat({**body, "messages": [*HI, answer("1")]}).given_prompt()


def test_arguments_reach_the_template_as_the_family_takes_them() -> None:
    messages = [*HI, {**ASSISTANT, "tool_calls": [call("1", '{"a": 1}'), call("2", '{"a": ')]}]
    messages += [answer("2"), answer("1")]
    request = parse_chat({"model": "m", "messages": messages, "tools": [tool()]})
    for form, expected in (
        (HERMES, {"a": 1}),
        (find_format("tools<｜tool▁calls▁begin｜>"), '{"a": 1}'),
    ):
        prompt = fit_to_format(request.to_generation_request(), form).prompt
        assert isinstance(prompt, ChatPrompt)
        first, second = prompt.messages[1]["tool_calls"]
        assert first["function"]["arguments"] == expected
        assert second["function"]["arguments"] == '{"a": '
        assert prompt.tools == [tool()]


def test_reasoning_reaches_gpt_oss_under_its_own_name() -> None:
    """The template refuses `thinking` beside the content of a message with calls."""
    asked = {**ASSISTANT, "reasoning": "hm", "tool_calls": [call("1")]}
    for content, expected in ((None, "hm"), ("I look.", None)):
        messages = [*HI, {**asked, "content": content}, answer("1")]
        request = parse_chat({"model": "m", "messages": messages, "tools": [tool()]})
        form = find_format("tools <|channel|><|message|>")
        prompt = fit_to_format(request.to_generation_request(), form).prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.messages[1].get("thinking") == expected


@pytest.mark.parametrize(
    ("template", "parser", "family"),
    [
        ("tools <tool_call>{}</tool_call> <think></think>", "", "hermes"),
        ("tools <tool_call><function=", "", "qwen3_coder"),
        ("tools [TOOL_CALLS]", "", "mistral"),
        ("tools <|python_tag|>", "", "llama3_json"),
        ("tools <|python_start|>", "", "pythonic"),
        ("tools <｜tool▁calls▁begin｜>", "", "deepseek"),
        ("tools <|channel|><|message|>", "", "openai"),
        ("tools <tool_call><arg_key>", "", ""),
        ("tools", "", ""),
        ("<tool_call>", "", ""),
        ("tools", "mistral", "mistral"),
        ("tools <tool_call>", NO_PARSER, ""),
    ],
)
def test_family_is_found_by_the_template(template: str, parser: str, family: str) -> None:
    form = find_format(template, parser)
    assert ("" if form.refusal else form.family_name) == family
    request = parse_chat({"model": "m", "messages": HI, "tools": [tool()]}).to_generation_request()
    if family:
        assert fit_to_format(request, form).answer == request.answer
        return
    with pytest.raises(ApiError) as caught:
        fit_to_format(request, form)
    assert (caught.value.code, caught.value.param) == (Code.UNSUPPORTED, "tools")


def test_plain_answers_have_no_events() -> None:
    assert not has_events(options_of(), HERMES)
    assert not has_events(None, find_format("</think>"))
    assert not has_events(options_of(tools=[tool()], tool_choice="none"), NO_FORMAT)
    assert has_events(options_of(), find_format("</think>"))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_ids_depend_on_prompt_seed_and_position_only(name: str) -> None:
    form = find_format("tools", name)
    given = {
        "hermes": '<tool_call>{"name": "f"}', "llama3_json": '{"name": "f"}', "pythonic": "[f()]",
        "mistral": '[TOOL_CALLS] [{"name": "f"}]',
        "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
        "qwen3_coder": "<function=f></function>", "openai": "<|channel|>c to=functions.f<|message|>{}",
    }[name]  # fmt: skip

    def id_of(prompt: tuple[int, ...], seed: int, position: int) -> str:
        parser = AnswerParser(options_of(tools=[tool()]), form, prompt, "", seed)
        events = parser.add_token(position, given, is_last=True)
        return next(event.id for event in events if isinstance(event, ToolCallStart))

    first = id_of((1, 2), 7, 5)
    assert first == id_of((1, 2), 7, 5)
    assert len({first, id_of((1, 3), 7, 5), id_of((1, 2), 8, 5), id_of((1, 2), 7, 6)}) == 4
    assert first.removeprefix("call_").isalnum()
    assert name != "mistral" or len(first) == 9


def test_reasoning_is_counted_and_left_out_on_demand() -> None:
    form = find_format("tools <tool_call></think>")
    pieces = ["<think>", "a", " b", "</think>", "\n", "Hello"]
    for include, prompt_end in ((True, ""), (False, ""), (True, "x<think>\n")):
        parser = AnswerParser(options_of(include_reasoning=include), form, (), prompt_end, 0)
        made = pieces[1:] if prompt_end else pieces
        events = [e for n, p in enumerate(made) for e in parser.add_token(n, p, is_last=False)]
        texts = [e.text for e in events if isinstance(e, ReasoningDelta)]
        assert "".join(texts) == ("a b" if include else "")
        assert events[-1] == TextDelta("Hello")
        assert parser.reasoning_tokens == len(made) - 2


def test_events_become_openai_deltas() -> None:
    events = (
        ReasoningDelta("r"), TextDelta("t"), ToolCallStart(0, "f", "call_1"), ToolCallArguments(0, "{"),
        ToolCallArguments(0, "}"), ToolCallStart(1, "g", "call_2"),
    )  # fmt: skip
    function, other = {"name": "f", "arguments": "{}"}, {"name": "g", "arguments": ""}
    assert chat_delta(events) == {
        "reasoning_content": "r",
        "content": "t",
        "tool_calls": [
            {"index": 0, "id": "call_1", "type": "function", "function": function},
            {"index": 1, "id": "call_2", "type": "function", "function": other},
        ],
    }
    assert chat_delta(events[3:5]) == {
        "tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]
    }
    whole = chat_message(events[2:])
    assert whole["content"] is None
    assert whole["tool_calls"][0] == {"id": "call_1", "type": "function", "function": function}
    assert chat_message(()) == {"role": "assistant", "content": "", "refusal": None}
