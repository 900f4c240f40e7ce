"""Forced and strict tool calls over HTTP on a real swarm whose model writes nonsense."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from support.models.structured import BODY, SCHEMAS, STOP, TOOLS, make_structured_model, tool
from support.processes.swarm import Running, running_swarm


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_structured_model(tmp_path_factory.mktemp("scripted"))
    with running_swarm(folder, "forced", spans=2, replicas=2) as made:
        yield made


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    url = f"http://{running.local.http}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def post(running: Running, **changes: Any) -> httpx.Response:
    url = f"http://{running.local.http}/v1/chat/completions"
    return httpx.post(url, json={**BODY, **changes}, timeout=300)


def test_required_call_follows_its_schema(client: openai.OpenAI) -> None:
    for seed in (1, 2, 3):
        choice = client.chat.completions.create(**BODY, seed=seed).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        for call in choice.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_named_function_is_called_once(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "stop"}}
    body = {**BODY, "tool_choice": choice}
    calls = client.chat.completions.create(**body, seed=4).choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["stop"]
    jsonschema.validate(json.loads(calls[0].function.arguments), STOP)


def test_allowed_tools_are_the_only_ones_called(client: openai.OpenAI) -> None:
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}
    body: dict[str, Any] = {
        **BODY,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": some},
        "parallel_tool_calls": False,
    }
    for seed in (5, 6):
        calls = client.chat.completions.create(**body, seed=seed).choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["stop"]


@pytest.mark.full
def test_streamed_fragments_make_the_whole_call(client: openai.OpenAI) -> None:
    body = {**BODY, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**body, seed=7).choices[0].message.tool_calls[0]
    name, parts, ids = "", list[str](), list[str]()
    for chunk in client.chat.completions.create(**body, seed=7, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            parts.append(call.function.arguments or "")
            ids += [call.id] if call.id else []
    assert (name, "".join(parts), ids) == (
        whole.function.name, whole.function.arguments, [whole.id]
    )  # fmt: skip
    assert len(parts) > 2


def test_strict_tool_leaves_text_free_and_holds_calls(running: Running) -> None:
    """Greedily the model writes its own text, in which the call breaks the schema, so it is bent."""
    body = {"tools": [tool("stop", strict=True)], "tool_choice": "auto", "temperature": 0}
    message = post(running, **body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("No.", "Hm..")
    for call in message["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), STOP)


def test_answer_with_format_is_calls_or_content(running: Running) -> None:
    """The model calls, as it always does; with its marker biased away, its content follows the schema."""
    schema = {"name": "stop", "strict": True, "schema": STOP}
    form = {"type": "json_schema", "json_schema": schema}
    body = {"response_format": form, "tool_choice": "auto", "tools": [tool("stop", strict=True)]}
    choice = post(running, **body).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    for call in choice["message"]["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), STOP)
    url = f"http://{running.local.http}/tokenize"
    asked = {"model": BODY["model"], "prompt": "<tool_call>", "add_special_tokens": False}
    (marker,) = httpx.post(url, json=asked, timeout=300).json()["tokens"]
    choice = post(running, **body, logit_bias={str(marker): -100}).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"].get("tool_calls")) == ("stop", None)
    jsonschema.validate(json.loads(choice["message"]["content"]), STOP)


def test_forced_call_leaves_no_content_to_format(running: Running) -> None:
    message = post(running, response_format={"type": "json_object"}, seed=3).json()["choices"][0][
        "message"
    ]
    assert message["content"] is None and message["tool_calls"]


def test_content_with_format_may_follow_reasoning(running: Running) -> None:
    """Greedily the model reasons first; its content is then bent to the format."""
    form = {"type": "json_schema", "json_schema": {"name": "stop", "schema": STOP}}
    body = {"tools": None, "tool_choice": None, "temperature": 0, "response_format": form}
    message = post(running, **body).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm.."
    jsonschema.validate(json.loads(message["content"]), STOP)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        (
            {"tools": [tool("move", parameters={"uniqueItems": True})]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [*TOOLS, tool("f", strict=True, parameters={"foo": 1})]},
            "tools[2].function.parameters",
        ),
        (
            {"tools": [tool("f", parameters={"properties": {"a": False}, "required": ["a"]})]},
            "tools[0].function.parameters",
        ),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"guided_grammar": 'start: "a"'}, "guided_grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "strnig"}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_unusable_tools_are_refused_before_a_session(
    running: Running, changes: dict[str, Any], param: str
) -> None:
    answer = post(running, **changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
