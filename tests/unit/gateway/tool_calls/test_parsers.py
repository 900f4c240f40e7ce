"""Each family's calls are read, whatever the pieces; what is no call of a declared tool stays text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_events,
)
from modelswarm_gateway.generation.tool_calls.families import FAMILIES
from modelswarm_gateway.generation.tool_calls.reader import OutputReader
from modelswarm_gateway.generation.tool_calls.tool import Tool

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "more": {"type": "object"},
        },
    },
)
CLOCK = Tool("clock", {"type": "object", "properties": {}})
TOOLS = {tool.name: tool for tool in (WEATHER, CLOCK)}
CITY = 'Rå"<\\n{'
ARGUMENTS = {"city": CITY, "days": 3, "more": {"a": [1, None, True, "}"]}}
RAW = json.dumps(ARGUMENTS, ensure_ascii=False)
D = "<｜tool▁{}｜>"


def deepseek_call(body: str) -> str:
    return f"{D.format('call▁begin')}{body}{D.format('call▁end')}"


def deepseek(*bodies: str) -> str:
    calls = "\n".join(map(deepseek_call, bodies))
    return f"{D.format('calls▁begin')}{calls}{D.format('calls▁end')}"


def xml_call(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def named(key: str, name: str = "get_weather", arguments: str = RAW) -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


XML_WEATHER = xml_call("get_weather", city=CITY, days="3", more=json.dumps(ARGUMENTS["more"]))
HARMONY_CALL = (
    f"<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{RAW}<|call|>"
)
SEPARATOR = D.format("sep")
# family, answer of the model, text of the answer, its calls
ONE, TWO = [("get_weather", ARGUMENTS)], [("get_weather", ARGUMENTS), ("clock", {})]
HERMES = f"<tool_call>\n{named('arguments')}\n</tool_call>"
CALLS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", HERMES, "", ONE),
    (
        "hermes",
        f'Let me see.\n{HERMES}\n<tool_call>\n{{"name": "clock"}}\n</tool_call>',
        "Let me see.",
        TWO,
    ),
    ("hermes", f"{HERMES}\nDone.", "\nDone.", ONE),
    (
        "hermes",
        f'<tool_call>{{"arguments": {RAW}, "name": "get_weather"}}</tool_call>',
        "",
        ONE,
    ),
    ("hermes", f"<tool_call>{named('arguments')}}}</tool_call>", "", ONE),
    (
        "hermes",
        f"<tool_call>{named('arguments', arguments=json.dumps(RAW))}</tool_call>",
        "",
        ONE,
    ),
    (  # line breaks in a string are no JSON
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\n\tb"}}</tool_call>',
        "",
        [("get_weather", {"city": "a\n\tb"})],
    ),
    ("hermes", '<tool_call>{"name": "clock", "arguments": ""}</tool_call>', "", TWO[1:]),
    ("llama3_json", named("parameters"), "", ONE),
    (
        "llama3_json",
        f"<|python_tag|>{named('parameters')}; {named('parameters', 'clock', '{}')}",
        "",
        TWO,
    ),
    ("llama3_json", f"Sure.\n<|python_tag|>{named('parameters')}", "Sure.", ONE),
    (
        "mistral",
        f"[TOOL_CALLS] [{named('arguments')}, {named('arguments', 'clock', '{}')}]",
        "",
        TWO,
    ),
    ("mistral", f"Yes. [TOOL_CALLS]get_weather[ARGS]{RAW}[TOOL_CALLS]clock[ARGS]{{}}", "Yes.", TWO),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{RAW}", "", ONE),
    (
        "deepseek",
        deepseek(
            f"function{SEPARATOR}get_weather\n```json\n{RAW}\n```",
            f"function{SEPARATOR}clock\n```json\n{{}}\n```",
        ),
        "",
        TWO,
    ),
    (
        "deepseek",
        f"Hm.\n{deepseek(f'get_weather{SEPARATOR}{RAW}', f'clock{SEPARATOR}{{}}')}",
        "Hm.",
        TWO,
    ),
    (
        "qwen3_coder",
        f"Well.\n{XML_WEATHER}\n{xml_call('clock')}",
        "Well.",
        TWO,
    ),
    (
        "pythonic",
        '[get_weather(city="Rå\\"<\\\\n{", days=3, more={"a": [1, None, True, "}"]}), clock()]',
        "",
        TWO,
    ),
    (  # escapes of JSON that mean something else in Python
        "pythonic",
        '[get_weather(city="\\ud83d\\ude00")]',
        "",
        [("get_weather", {"city": "😀"})],
    ),
    (
        "openai",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        + RAW
        + "<|call|>",
        "",
        ONE,
    ),
    (
        "openai",
        f"<|channel|>commentary<|message|>One moment.<|end|>{HARMONY_CALL}",
        "One moment.",
        ONE,
    ),
]
# Answers that have no call of a declared tool.
TEXTS = [
    ("hermes", "A < b, <tool_ and <tool_call> and {}"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "clo'),
    ("llama3_json", '{"name": "Bob", "age": 3}'),
    ("llama3_json", "{not JSON"),
    ("llama3_json", " [1, 2]"),
    ("mistral", "a[TOOL_CALLS]unknown[ARGS]{}"),
    ("mistral", "a[TOOL_CALLS] [5]"),
    ("mistral", 'a[TOOL_CALLS]{"name": "unknown"} b'),
    ("deepseek", f"a{deepseek(f'unknown{SEPARATOR}{{}}')}"),
    ("deepseek", f"a{deepseek('no separator')}"),
    ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>"),
    ("qwen3_coder", "a <function=clo"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[unknown(a=1)]"),
    ("openai", "no header"),
]
ANSWERS = [(family, text) for family, text, _, _ in CALLS] + TEXTS


def make_reader(family: str, **options: bool) -> OutputReader:
    return FAMILIES[family].reader(TOOLS, **options)


def read(reader: OutputReader, pieces: Iterable[str]) -> list[OutputEvent]:
    events = [event for piece in pieces for event in reader.feed(piece)]
    return merge_events([*events, *reader.finish()])


def answer_of(events: Sequence[OutputEvent]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text, and each call's name and arguments."""
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case ToolCallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ToolCallArguments(index, fragment):
                calls[index] = (calls[index][0], calls[index][1] + fragment)
            case _:
                continue
    return text, calls


@pytest.mark.parametrize(("family", "answer", "text", "calls"), CALLS)
def test_calls_of_a_family_are_read(
    family: str, answer: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    shown, made = answer_of(read(make_reader(family), [answer]))
    assert (shown, [(name, json.loads(arguments)) for name, arguments in made]) == (text, calls)


@pytest.mark.parametrize(
    ("kinds", "text", "value"),
    [
        (["string", "null"], "10115", "10115"),
        (["string", "null"], '"10115"', "10115"),
        (["string", "null"], "true story", "true story"),
        (["string", "null"], "None", None),
        (["integer", "null"], "None", None),
        (["integer"], "5", 5),
        (["integer"], "five", "five"),
        (["integer"], '"5"', "5"),
        (["boolean"], "True", True),
        (["array"], "['a', None]", ["a", None]),
        (["object"], "{'a': (1, 2)}", {"a": [1, 2]}),
        ([], "10115", 10115),
        ([], "True", "True"),
    ],
)
def test_value_in_tags_has_a_type_of_its_schema(kinds: list[str], text: str, value: Any) -> None:
    """Optional texts of pydantic are {"anyOf": [{"type": "string"}, {"type": "null"}]}."""
    for schema in ({"type": kinds} if kinds else {}, {"anyOf": [{"type": k} for k in kinds]}):
        tool = Tool("f", {"type": "object", "properties": {"a": schema}})
        reader = FAMILIES["qwen3_coder"].reader({"f": tool})
        _, [(_, arguments)] = answer_of(read(reader, [xml_call("f", a=text)]))
        assert json.loads(arguments) == {"a": value}


@pytest.mark.parametrize("one_call", [False, True])
@pytest.mark.parametrize(("family", "answer"), TEXTS)
def test_text_without_a_call_is_unchanged(family: str, answer: str, one_call: bool) -> None:
    reader = make_reader(family, one_call=one_call)
    assert answer_of(read(reader, [answer])) == (answer, [])


@pytest.mark.parametrize(("family", "answer"), ANSWERS)
def test_every_prefix_shows_a_prefix_of_the_answer(family: str, answer: str) -> None:
    whole = read(make_reader(family), [answer])
    for length in range(len(answer) + 1):
        begun = merge_events(make_reader(family).feed(answer[:length]))
        assert is_prefix(begun, whole), answer[:length]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(ANSWERS), st.data())
def test_events_do_not_depend_on_the_pieces(answer: tuple[str, str], data: st.DataObject) -> None:
    family, text = answer
    cut = data.draw(st.integers(0, len(text)))
    text = text[:cut] if data.draw(st.booleans()) else text
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(make_reader(family), pieces) == read(make_reader(family), text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(
        st.sampled_from(
            [part for _, text in ANSWERS for part in (text, text[: len(text) // 2])]
            + ["<tool_call>", "[TOOL_CALLS]", "{", "}", "<think>", "</think>", " ", "\n", '"', "x"]
        ),
        max_size=4,
    ),
    st.integers(1, 9),
)
def test_any_text_is_read_without_loss_of_prefixes(
    family: str, parts: list[str], size: int
) -> None:
    text = "".join(parts)
    options = {"has_reasoning": family != "openai"}
    whole = read(make_reader(family, **options), [text])
    reader, shown = make_reader(family, **options), []
    for start in range(0, len(text), size):
        shown += reader.feed(text[start : start + size])
        assert is_prefix(merge_events(shown), whole)
    assert merge_events([*shown, *reader.finish()]) == whole


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"openai"}))
@pytest.mark.parametrize("is_thinking", [False, True])
def test_reasoning_is_split_from_the_answer(family: str, is_thinking: bool) -> None:
    call = next(text for name, text, _, _ in CALLS if name == family)
    opening = "" if is_thinking else "<think>"
    reader = make_reader(family, has_reasoning=True, is_thinking=is_thinking)
    events = read(reader, f"{opening}\nI call <tool_call> a tool.\n</think>\n\n{call}")
    assert events[0] == ReasoningDelta("I call <tool_call> a tool.")
    assert answer_of(events)[1][0][0] == "get_weather"


def test_reasoning_of_harmony_is_split_from_the_answer() -> None:
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello "
    assert read(make_reader("openai"), answer) == [ReasoningDelta("Hm."), TextDelta("Hello ")]


def test_text_without_reasoning_keeps_its_white_space() -> None:
    assert read(OutputReader({}, has_reasoning=True), " \n a ") == [TextDelta(" \n a ")]


@pytest.mark.parametrize(("family", "answer", "text", "calls"), CALLS)
def test_one_call_ends_the_answer(
    family: str, answer: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    reader = make_reader(family, one_call=True)
    events = read(reader, answer)
    assert reader.has_ended
    assert [(name, json.loads(raw)) for name, raw in answer_of(events)[1]] == calls[:1]


def is_prefix(begun: Sequence[OutputEvent], whole: Sequence[OutputEvent]) -> bool:
    """Return whether more events, merged, may make `whole` of `begun`."""
    if not begun:
        return True
    if list(begun[:-1]) != list(whole[: len(begun) - 1]) or len(whole) < len(begun):
        return False
    last, other = begun[-1], whole[len(begun) - 1]
    if type(last) is not type(other):
        return False
    if isinstance(last, ToolCallStart):
        return last == other
    assert not isinstance(other, ToolCallStart)
    return other.text.startswith(last.text) and getattr(last, "index", 0) == getattr(
        other, "index", 0
    )
