"""Tool calls and reasoning over HTTP: the openai client, across the loss of a server and a resumed stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.models.scripted import make_scripted_model
from support.models.scripted_calls import ANSWER, ARGUMENTS
from support.processes.streams import TOY_MODEL
from support.processes.swarm import Running, running_swarm

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments.items() | list }}"
    "{% endfor %}{% endfor %}<|assistant|>{# <think></think> #}"
)
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "clock")
]
HI: Any = [{"role": "user", "content": "hi"}]
BODY = {"model": TOY_MODEL, "messages": HI, "tools": TOOLS, "seed": 7, "temperature": 0}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_scripted_model(tmp_path_factory.mktemp("scripted"), ANSWER, TEMPLATE)
    with running_swarm(folder, "tools", spans=2, replicas=2) as made:
        yield made


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://{running.local.http}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


def whole(running: Running, **changes: Any) -> dict[str, Any]:
    answer = httpx.post(
        f"http://{running.local.http}/v1/chat/completions", json={**BODY, **changes}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def stream(running: Running, last: str = "", **changes: Any) -> Iterator[tuple[str, Any]]:
    """Yield the id and the choice of each event."""
    headers = {"Last-Event-ID": last} if last else {}
    body = {**BODY, **changes, "stream": True}
    url = f"http://{running.local.http}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        event_id = ""
        for line in answer.iter_lines():
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: {"):
                yield event_id, json.loads(line[6:])["choices"][0]


def joined(choices: list[Any]) -> dict[str, Any]:
    """Return the message that the deltas make, and the finish reason."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: list[Any] = []
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for entry in delta.get("tool_calls", []):
            if "id" in entry:
                assert entry["index"] == len(calls)
                calls.append(
                    {"id": entry["id"], "type": "function", "function": {**entry["function"]}}
                )
            else:
                calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
    return message | {"tool_calls": calls, "refusal": None, "finish": choices[-1]["finish_reason"]}


def expected(running: Running) -> dict[str, Any]:
    choice = whole(running)["choices"][0]
    made: dict[str, Any] = choice["message"] | {"finish": choice["finish_reason"]}
    return made


def test_openai_client_reads_calls_and_answers_them(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(**BODY)
    message = made.choices[0].message
    assert (message.content, message.reasoning_content) == ("Let me see.", "Which city?")
    assert made.choices[0].finish_reason == "tool_calls"
    first, second = message.tool_calls
    assert (first.function.name, json.loads(first.function.arguments)) == ("get_weather", ARGUMENTS)
    assert (second.function.name, second.function.arguments) == ("clock", "{}")
    assert first.id != second.id
    assert 0 < made.usage.completion_tokens_details.reasoning_tokens < made.usage.completion_tokens
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [c.to_dict() for c in message.tool_calls],
        },
    ]
    messages += [
        {"role": "tool", "tool_call_id": c.id, "content": "rain"} for c in message.tool_calls
    ]
    assert client.chat.completions.create(**{**BODY, "messages": messages}).choices


def test_deltas_make_the_whole_answer(running: Running) -> None:
    assert joined([choice for _, choice in stream(running)]) == expected(running)


@pytest.mark.full
def test_choices_and_flags_shape_the_answer(running: Running) -> None:
    one = whole(running, parallel_tool_calls=False)["choices"][0]
    assert [c["function"]["name"] for c in one["message"]["tool_calls"]] == ["get_weather"]
    hidden = whole(running, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in hidden
    none = whole(running, tool_choice="none")["choices"][0]
    assert "<tool_call>" in none["message"]["content"]
    assert (none["finish_reason"], "tool_calls" in none["message"]) == ("stop", False)
    short = whole(running, max_tokens=60)["choices"][0]
    assert (short["finish_reason"], len(short["message"]["tool_calls"])) == ("length", 1)


@pytest.mark.full
def test_kill_within_the_arguments_changes_nothing(running: Running) -> None:
    running.wait_whole()
    before = running.faults()
    got: list[Any] = []
    for _, choice in stream(running, session_id="kill"):
        got.append(choice)
        if len(got) == 40:
            assert joined(got)["tool_calls"][0]["function"]["arguments"]
            running.kill(running.only_session().route[1].peer)
    assert running.faults().reroutes > before.reroutes
    assert joined(got) == expected(running)


@pytest.mark.full
def test_resumed_stream_repeats_ids_and_fragments(running: Running) -> None:
    running.wait_whole()
    got: list[Any] = []
    last = ""
    for last, choice in stream(running, session_id="resumed"):  # noqa: B007
        got.append(choice)
        if len(got) == 40:
            break
    got += [choice for _, choice in stream(running, last, session_id="resumed")]
    assert joined(got) == expected(running)
