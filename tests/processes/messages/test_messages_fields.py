"""Every field of Anthropic's tables, posted to a real swarm: obeyed ones change the answer, the others do as they say.

A field that becomes OBEYED needs an entry in `EFFECTS`, or in `OTHER_TESTS` if another test shows its effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.processes.swarm import MODEL

from modelswarm_gateway.api.fields.messages import (
    ANTHROPIC_TABLES,
    ANTHROPIC_TOOL,
    ANTHROPIC_TOOL_CHOICE,
    COUNT_TOKENS,
    INPUT_MESSAGE,
    MESSAGES,
    OUTPUT_CONFIG,
    OUTPUT_FORMAT,
    TEXT_BLOCK,
    THINKING,
    THINKING_BLOCK,
    TOOL_RESULT_BLOCK,
    TOOL_USE_BLOCK,
)
from modelswarm_gateway.api.fields.states import FieldTable, NoEffect, Refused

Body = dict[str, Any]
PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
HI = {"role": "user", "content": "tell me"}
SAMPLED: Body = {"model": MODEL, "max_tokens": 24, "seed": 7, "temperature": 1, "messages": [HI]}
COUNTED: Body = {"model": MODEL, "messages": [HI]}
CALL: Body = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
RESULT: Body = {"type": "tool_result", "tool_use_id": "c", "content": "done"}
TOOL: Body = {"name": "f", "input_schema": {"type": "object"}}
SCHEMA: Body = {"type": "json_schema", "schema": {"type": "integer"}}
SEEDS = range(7, 40)
ODD = {"odd": ["value"]}  # harmless for no field


def with_blocks(call: Body, result: Body) -> Body:
    messages = [
        HI,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    return SAMPLED | {"messages": messages}


def with_content(role: str, block: Body) -> Body:
    return SAMPLED | {"messages": [HI, {"role": role, "content": [block]}, HI]}


# Name of the table -> path of the endpoint, and the function that builds a body with fields of that table.
PLACES: dict[str, tuple[FieldTable, str, Callable[[Body], Body]]] = {
    "messages": (MESSAGES, PATH, lambda fields: SAMPLED | fields),
    "count": (COUNT_TOKENS, COUNT, lambda fields: COUNTED | fields),
    "message": (INPUT_MESSAGE, PATH, lambda fields: SAMPLED | {"messages": [HI | fields]}),
    "text": (
        TEXT_BLOCK,
        PATH,
        lambda fields: with_content("user", {"type": "text", "text": "x"} | fields),
    ),
    "thinking_block": (
        THINKING_BLOCK,
        PATH,
        lambda fields: with_content("assistant", {"type": "thinking", "thinking": "x"} | fields),
    ),
    "tool_use": (TOOL_USE_BLOCK, PATH, lambda fields: with_blocks(CALL | fields, RESULT)),
    "tool_result": (TOOL_RESULT_BLOCK, PATH, lambda fields: with_blocks(CALL, RESULT | fields)),
    "tool": (
        ANTHROPIC_TOOL,
        PATH,
        lambda fields: SAMPLED | {"tools": [TOOL | fields], "tool_choice": {"type": "none"}},
    ),
    "tool_choice": (
        ANTHROPIC_TOOL_CHOICE,
        PATH,
        lambda fields: SAMPLED | {"tool_choice": {"type": "auto"} | fields},
    ),
    "thinking": (
        THINKING,
        PATH,
        lambda fields: SAMPLED | {"thinking": {"type": "adaptive"} | fields},
    ),
    # The servers of this swarm have no tokenizer by which they could constrain an answer.
    "output_config": (OUTPUT_CONFIG, COUNT, lambda fields: COUNTED | {"output_config": fields}),
    "output_format": (
        OUTPUT_FORMAT,
        COUNT,
        lambda fields: COUNTED | {"output_config": {"format": SCHEMA | fields}},
    ),
}
_PROMPT: dict[str, tuple[Body, Body]] = {
    "model": ({}, {"model": "none"}),
    "messages": ({}, {"messages": [HI | {"content": "something longer"}]}),
    "system": ({}, {"system": "be kind"}),
}
# Place -> field -> (fields of the first request, those that the second one has beside them).
EFFECTS: dict[str, dict[str, tuple[Body, Body]]] = {
    "messages": {
        **_PROMPT,
        "max_tokens": ({}, {"max_tokens": 3}),
        "stop_sequences": ({}, {"stop_sequences": list("abcdefghijklmno")}),
        "stream": ({}, {"stream": True}),
        "temperature": ({}, {"temperature": 0}),
        "top_p": ({}, {"top_p": 0.01}),
        "top_k": ({}, {"top_k": 1}),
        "seed": ({}, {"seed": 8}),
    },
    "count": _PROMPT,
    "message": {
        "role": ({}, {"role": "system"}),
        "content": ({}, {"content": "other"}),
    },
    "text": {"text": ({}, {"text": "y"})},
    "tool_result": {"content": ({}, {"content": "other"})},
}
# This swarm's model has neither tools nor reasoning nor grammars: test_messages_client.py has one that does, and
# tests/unit/gateway/api/requests/test_messages_requests.py has the errors of these fields.
OTHER_TESTS: dict[str, set[str]] = {
    "messages": {"tools", "tool_choice", "thinking", "output_config"},
    "count": {"tools", "tool_choice", "thinking", "output_config"},
    "text": {"type"},
    "thinking_block": {"type", "thinking"},
    "tool_use": {"type", "id", "name", "input"},
    "tool_result": {"type", "tool_use_id"},
    "tool": {"type", "name", "description", "input_schema", "strict"},
    "tool_choice": {"type", "name", "disable_parallel_tool_use"},
    "thinking": {"type", "display"},
    "output_config": {"effort", "format"},
    "output_format": {"type", "schema"},
}


def answer_of(client: httpx.Client, path: str, body: Body) -> object:
    """Return the answer without what differs from request to request."""
    answer = client.post(path, json=body)
    if answer.headers["content-type"].startswith("text/event-stream"):
        return [line for line in answer.iter_lines() if "message_start" not in line]
    return {name: value for name, value in answer.json().items() if name != "id"}


def test_every_table_has_a_place() -> None:
    assert [table for table, _, _ in PLACES.values()] == [table for table, _ in ANTHROPIC_TABLES]


@pytest.mark.parametrize("place", PLACES)
def test_every_obeyed_field_has_an_effect(client: httpx.Client, place: str) -> None:
    table, path, build = PLACES[place]
    effects = EFFECTS.get(place, {})
    assert table.obeyed == effects.keys() | OTHER_TESTS.get(place, set())
    for name, (first, second) in effects.items():
        seeds: list[Body] = (
            [{}] if name == "seed" or place == "count" else [{"seed": s} for s in SEEDS]
        )
        assert any(
            answer_of(client, path, build(first) | seed)
            != answer_of(client, path, build(first | second) | seed)
            for seed in seeds
        ), f"{name} changes nothing"


@pytest.mark.parametrize("place", PLACES)
def test_every_refused_field_is_refused_by_name(client: httpx.Client, place: str) -> None:
    table, path, build = PLACES[place]
    for name, state in table.states.items():
        if not isinstance(state, Refused):
            continue
        answer = client.post(path, json=build({name: ODD}))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter"), name
        assert error["param"].split(".")[-1] == name
        assert name in error["message"]


@pytest.mark.parametrize("place", PLACES)
def test_harmless_values_and_effectless_fields_change_nothing(
    client: httpx.Client, place: str
) -> None:
    table, path, build = PLACES[place]
    plain = answer_of(client, path, build({}))
    assert "error" not in str(plain)
    for name, state in table.states.items():
        values: tuple[object, ...] = ()
        if isinstance(state, NoEffect):
            values = (ODD, "text", True)
        elif isinstance(state, Refused):
            values = (None, *state.harmless)
        for value in values:
            assert answer_of(client, path, build({name: value})) == plain, (name, value)
