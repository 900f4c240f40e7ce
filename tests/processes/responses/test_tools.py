"""Function tools and reasoning in responses: the openai client, a killed server, a resumed stream, a second turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.models.scripted import make_scripted_model
from support.models.scripted_calls import ANSWER, ARGUMENTS
from support.processes.streams import TOY_MODEL
from support.processes.swarm import Running, running_swarm
from support.response_streams import ResponseStream

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments.items() | list }}"
    "{% endfor %}{% endfor %}<|assistant|>{# <think></think> #}"
)
TOOLS: Any = [
    {"type": "function", "name": name, "parameters": {"type": "object"}}
    for name in ("get_weather", "clock")
]
BODY: dict[str, Any] = {"model": TOY_MODEL, "input": "hi", "tools": TOOLS, "temperature": 0}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_scripted_model(tmp_path_factory.mktemp("scripted"), ANSWER, TEMPLATE)
    with running_swarm(folder, "response-tools", spans=2, replicas=2) as made:
        yield made


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    url = f"http://{running.local.http}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return output items without what differs from response to response."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


def expected(client: openai.OpenAI) -> list[dict[str, Any]]:
    made = client.responses.create(**BODY, store=False)
    return without_ids([item.to_dict() for item in made.output])


def test_reasoning_text_and_calls_are_items(client: openai.OpenAI) -> None:
    made = client.responses.create(**BODY)
    reasoning, message, weather, clock = made.output
    assert made.status == "completed"
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert reasoning.content[0].text == "Which city?"
    assert message.type == "message" and made.output_text == "Let me see."
    assert weather.type == clock.type == "function_call"
    assert (weather.name, json.loads(weather.arguments)) == ("get_weather", ARGUMENTS)
    assert (clock.name, clock.arguments) == ("clock", "{}")
    assert made.usage is not None
    assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens


@pytest.mark.full
def test_outputs_of_calls_continue_the_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(**BODY)
    outputs: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = client.responses.create(**BODY | {"input": outputs}, previous_response_id=first.id)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    history: Any = [{"role": "user", "content": "hi"}, *(i.to_dict() for i in first.output)]
    whole = client.responses.create(**BODY | {"input": [*history, *outputs]}, store=False)
    assert without_ids([i.to_dict() for i in whole.output]) == expected(client)
    with pytest.raises(openai.BadRequestError) as unanswered:
        client.responses.create(**BODY | {"input": "hm"}, previous_response_id=first.id)
    assert unanswered.value.param == "previous_response_id"


@pytest.mark.full
def test_choices_and_flags_shape_the_answer(client: openai.OpenAI) -> None:
    one = client.responses.create(**BODY, parallel_tool_calls=False)
    assert [item.type for item in one.output].count("function_call") == 1
    none = client.responses.create(**BODY, tool_choice="none")
    assert "<tool_call>" in none.output_text
    short = client.responses.create(**BODY, max_output_tokens=60)
    assert (short.status, short.output[-1].to_dict()["status"]) == ("incomplete", "incomplete")
    with pytest.raises(openai.BadRequestError) as mixed:
        client.responses.create(
            model=TOY_MODEL, input="hi", include=["message.output_text.logprobs"]
        )
    assert mixed.value.param == "include"


@pytest.mark.full
def test_kill_within_the_arguments_changes_nothing(running: Running, client: openai.OpenAI) -> None:
    running.wait_whole()
    before = running.faults()
    events = []
    for event in client.responses.create(**BODY, stream=True):
        events.append(event)
        if len(events) == 50:
            assert event.type == "response.function_call_arguments.delta"
            running.kill(running.wait_session(lambda s: s.state == "running").route[1].peer)
    assert running.faults().reroutes > before.reroutes
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    assert without_ids([item.to_dict() for item in last.response.output]) == expected(client)


@pytest.mark.full
def test_resumed_stream_has_every_event_once(running: Running, client: openai.OpenAI) -> None:
    running.wait_whole()
    stream = ResponseStream()
    url = f"http://{running.local.http}"
    for _ in stream.read(url, BODY):
        if len(stream.events) == 50:
            break
    stream.cut()
    assert list(stream.read(url, BODY))
    stream.assert_whole()
    assert without_ids(stream.response["output"]) == expected(client)
    kinds = stream.kinds
    for kind in ("output_item.added", "output_item.done", "function_call_arguments.done"):
        assert kinds.count(kind) == (2 if "arguments" in kind else 4)
