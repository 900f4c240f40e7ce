"""Anthropic's client against a real swarm: blocks, streams, tools and errors, across the loss of a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock
from support.models.scripted import make_scripted_model
from support.models.scripted_calls import ANSWER, ARGUMENTS, NUMBERS
from support.processes.streams import TOY_MODEL
from support.processes.swarm import Running, running_swarm

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{{ m.reasoning_content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments.items() | list }}{% endfor %}{% endfor %}{{ reasoning_effort or '' }}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}<|assistant|>"
    "{# <think></think> #}"
)
TOOLS: Any = [
    {"name": name, "input_schema": {"type": "object"}} for name in ("get_weather", "clock")
]
HI: Any = [{"role": "user", "content": "hi"}]
BODY: Any = {"model": TOY_MODEL, "messages": HI, "tools": TOOLS, "max_tokens": 1000}
SEEDED: Any = {**BODY, "extra_body": {"seed": 7, "temperature": 0}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_scripted_model(tmp_path_factory.mktemp("scripted"), ANSWER, TEMPLATE)
    with running_swarm(folder, "messages", spans=2, replicas=2) as made:
        yield made


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[anthropic.Anthropic]:
    url = f"http://{running.local.http}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def parts(message: Message) -> list[Any]:
    """Return what identifies the content of a message."""
    return [block.to_dict() for block in message.content]


@pytest.mark.full
def test_answer_continues_a_last_message_of_the_assistant(
    running: Running, client: anthropic.Anthropic
) -> None:
    """It is that of a chat with `continue_final_message`."""
    messages: Any = [*HI, {"role": "assistant", "content": "<think>x</think>So"}]
    body: Any = {"model": TOY_MODEL, "messages": messages, "max_tokens": 24}
    made = client.messages.create(**body, extra_body={"seed": 7, "temperature": 0})
    asked = body | {"continue_final_message": True, "seed": 7, "temperature": 0}
    url = f"http://{running.local.http}/v1/chat/completions"
    chat = httpx.post(url, json=asked, timeout=60).raise_for_status().json()
    assert made.usage.input_tokens == chat["usage"]["prompt_tokens"]
    text = "".join(block.text for block in made.content if block.type == "text")
    assert text == chat["choices"][0]["message"]["content"] != ""


def test_blocks_and_usage_have_anthropics_shape(client: anthropic.Anthropic) -> None:
    made = client.messages.create(**SEEDED)
    thinking, text, first, second = made.content
    assert isinstance(thinking, ThinkingBlock) and thinking.thinking == "Which city?"
    assert isinstance(text, TextBlock) and text.text == "Let me see."
    assert isinstance(first, ToolUseBlock) and isinstance(second, ToolUseBlock)
    assert (first.name, first.input) == ("get_weather", ARGUMENTS)
    assert (second.name, second.input) == ("clock", {})
    assert first.id != second.id
    assert (made.type, made.role, made.model) == ("message", "assistant", TOY_MODEL)
    assert (made.stop_reason, made.stop_sequence) == ("tool_use", None)
    details = made.usage.output_tokens_details
    assert details is not None
    assert 0 < details.thinking_tokens < made.usage.output_tokens
    assert made._request_id is not None


@pytest.mark.full
def test_results_are_sent_back_to_the_model(client: anthropic.Anthropic) -> None:
    made = client.messages.create(**SEEDED)
    calls = [block for block in made.content if isinstance(block, ToolUseBlock)]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "rain"},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": [text_block("noon")]},
        text_block("and now?"),
    ]
    messages = [*HI, {"role": "assistant", "content": made.content}]
    with pytest.raises(anthropic.BadRequestError, match="no tool_result block begins"):
        client.messages.create(**{**SEEDED, "messages": [*messages, *HI]})
    messages.append({"role": "user", "content": results})
    wanted = {**SEEDED, "messages": messages, "system": [text_block("be brief")]}
    again = client.messages.create(**wanted)
    assert parts(again)[:2] == parts(made)[:2]
    del wanted["max_tokens"], wanted["extra_body"]
    counted = client.messages.count_tokens(**wanted)
    assert counted.input_tokens == again.usage.input_tokens > made.usage.input_tokens


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def test_stream_has_anthropics_events_in_order(running: Running) -> None:
    kinds: list[str] = []
    events = list(raw_events(running, {**BODY, "seed": 7, "temperature": 0}))
    for kind, data in events:
        assert data["type"] == kind
        delta = data.get("delta", {}).get("type")
        name = f"{kind} {data['content_block']['type']}" if "content_block" in data else kind
        name = delta or name
        if not kinds or kinds[-1] != name:
            kinds.append(name)
    tool = ["content_block_start tool_use", "input_json_delta", "content_block_stop"]
    assert kinds == [
        "message_start",
        *("content_block_start thinking", "ping", "thinking_delta", "signature_delta"),
        *("content_block_stop", "content_block_start text", "text_delta", "content_block_stop"),
        *(*tool, *tool),
        *("message_delta", "message_stop"),
    ]
    starts = [data["index"] for kind, data in events if kind == "content_block_start"]
    assert starts == [0, 1, 2, 3]
    begin, end = events[0][1]["message"], events[-2][1]
    assert (begin["content"], begin["stop_reason"]) == ([], None)
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert begin["usage"]["input_tokens"] == end["usage"]["input_tokens"] > 0
    assert begin["usage"]["output_tokens"] == 0 < end["usage"]["output_tokens"]


def raw_events(running: Running, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    url = f"http://{running.local.http}/v1/messages"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        kind = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                yield kind, json.loads(line[6:])


def test_stream_makes_the_whole_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**SEEDED) as stream:
        made = stream.get_final_message()
    whole = client.messages.create(**SEEDED)
    assert parts(made) == parts(whole)
    assert (made.stop_reason, made.usage) == (whole.stop_reason, whole.usage)


def test_kill_within_the_arguments_changes_nothing(
    running: Running, client: anthropic.Anthropic
) -> None:
    running.wait_whole()
    before = running.faults()
    with client.messages.stream(**SEEDED) as stream:
        seen = 0
        for event in stream:
            seen += event.type == "input_json"
            if seen == 10:
                seen += 1
                running.kill(running.only_session().route[1].peer)
        made = stream.get_final_message()
    assert running.faults().reroutes > before.reroutes
    assert parts(made) == parts(client.messages.create(**SEEDED))


@pytest.mark.full
def test_options_shape_the_answer(client: anthropic.Anthropic) -> None:
    one = create(client, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [part["type"] for part in parts(one)] == ["thinking", "text", "tool_use"]
    for hidden in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        kinds = [part["type"] for part in parts(create(client, thinking=hidden))]
        assert kinds == ["text", "tool_use", "tool_use"]
    none = create(client, tool_choice={"type": "none"})
    assert "<tool_call>" in parts(none)[1]["text"]
    assert none.stop_reason == "end_turn"
    short = create(client, max_tokens=60)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 60)
    numbers = parts(short)[2]["input"]["numbers"]
    assert 0 < len(numbers) < len(NUMBERS) and numbers == NUMBERS[: len(numbers)]
    effort = create(client, output_config={"effort": "low"})
    assert effort.usage.input_tokens > one.usage.input_tokens


def test_schema_constrains_the_text(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"wet": {"type": "boolean"}, "wind": {"enum": ["calm", "storm"]}},
        "required": ["wet", "wind"],
    }
    form = {"type": "json_schema", "schema": schema}
    made = create(client, tools=[], output_config={"format": form})
    *reasoning, block = parts(made)
    assert [each["type"] for each in reasoning] in ([], ["thinking"])  # the schema is the text's
    assert json.loads(block["text"]).keys() == {"wet", "wind"}
    with pytest.raises(anthropic.BadRequestError) as wrong:
        create(client, tools=[], output_config={"format": {**form, "schema": {"type": "x"}}})
    assert body_of(wrong.value)["param"] == "output_config.format.schema"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "report"}])
def test_forced_call_follows_its_schema(client: anthropic.Anthropic, choice: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"wet": {"type": "boolean"}},
        "required": ["wet"],
        "additionalProperties": False,
    }
    tools = [{"name": "report", "input_schema": schema}]
    single = {**choice, "disable_parallel_tool_use": True}
    made = create(client, tools=tools, tool_choice=single)
    (call,) = (part for part in parts(made) if part["type"] == "tool_use")
    assert call["name"] == "report" and call["input"].keys() == {"wet"}
    assert made.stop_reason == "tool_use"
    wrong = {"name": "report", "strict": True, "input_schema": {**schema, "$ref": "#/missing"}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(client, tools=[wrong])
    assert body_of(refused.value)["param"].startswith("tools[0].input_schema")


def create(client: anthropic.Anthropic, **changes: Any) -> Message:
    made: Message = client.messages.create(**{**SEEDED, **changes})
    return made


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence_is_named(client: anthropic.Anthropic, stream: bool) -> None:
    wanted = {**SEEDED, "stop_sequences": ["never", "me s", "see"]}
    if stream:
        with client.messages.stream(**wanted) as events:
            made = events.get_final_message()
    else:
        made = client.messages.create(**wanted)
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "me s")
    assert parts(made)[1]["text"] == "Let "


def test_errors_have_anthropics_shape(client: anthropic.Anthropic, running: Running) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(client, model="none")
    assert body_of(missing.value)["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(client, messages=[{"role": "user", "content": [image]}])
    error = body_of(refused.value)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "messages[0].content[0].type" and "image" in error["message"]
    assert refused.value.request_id is not None
    for headers, param in (
        ({"anthropic-version": "2020-01-01"}, "anthropic-version"),
        ({"anthropic-beta": "prompt-caching-2024-07-31,files-api-2025-04-14"}, "anthropic-beta"),
        ({"last-event-id": "5-00000000"}, "Last-Event-ID"),
        ({"idempotency-key": "1"}, "idempotency-key"),
    ):
        with pytest.raises(anthropic.BadRequestError) as wrong:
            create(client, extra_headers=headers)
        assert body_of(wrong.value)["param"] == param
    plain = httpx.get(f"http://{running.local.http}/v1/messages")
    assert (plain.status_code, plain.json()["type"]) == (405, "error")


def body_of(error: anthropic.APIStatusError) -> dict[str, Any]:
    body: Any = error.body
    assert body["type"] == "error"
    detail: dict[str, Any] = body["error"]
    return detail


def test_betas_that_change_nothing_are_accepted(client: anthropic.Anthropic) -> None:
    made = client.beta.messages.create(
        **SEEDED, betas=["interleaved-thinking-2025-05-14", "claude-code-20250219"]
    )
    assert made.stop_reason == "tool_use"


def test_models_are_listed_in_anthropics_shape(client: anthropic.Anthropic) -> None:
    (listed,) = client.models.list()
    assert listed == client.models.retrieve(TOY_MODEL)
    assert (listed.id, listed.type, listed.display_name) == (TOY_MODEL, "model", TOY_MODEL)
    assert listed.created_at.year > 2000
    (beta,) = client.beta.models.list()  # which adds ?beta=true
    assert (beta.id, client.beta.models.retrieve(TOY_MODEL).id) == (TOY_MODEL, TOY_MODEL)
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("none")
    assert body_of(missing.value)["code"] == "model_not_found"
