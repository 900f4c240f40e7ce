"""Forced tool calls in responses, of a model that writes nonsense: required, named, some allowed, strict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from support.models.structured import SCHEMAS, make_structured_model
from support.processes.streams import TOY_MODEL
from support.processes.swarm import running_swarm

TOOLS: Any = [
    {"type": "function", "name": name, "parameters": schema, "strict": True}
    for name, schema in SCHEMAS.items()
]
BODY: dict[str, Any] = {
    "model": TOY_MODEL,
    "input": "go",
    "tools": TOOLS,
    "temperature": 1,
    "max_output_tokens": 900,
    "extra_body": {"seed": 4},
}
STOP: Any = {"type": "function", "name": "stop"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = make_structured_model(tmp_path_factory.mktemp("scripted"))
    with (
        running_swarm(folder, "forced-responses", spans=2) as running,
        openai.OpenAI(base_url=f"http://{running.local.http}/v1", api_key="none") as made,
    ):
        yield made


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"move", "stop"}),
        (STOP, {"stop"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [STOP]}, {"stop"}),
    ],
)
def test_forced_calls_follow_their_schemas(
    client: openai.OpenAI, choice: Any, names: set[str]
) -> None:
    made = client.responses.create(**BODY, tool_choice=choice)
    assert made.status == "completed"
    calls = [item for item in made.output if item.type == "function_call"]
    assert calls and {call.name for call in calls} <= names
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert made.tool_choice == choice or made.to_dict()["tool_choice"] == choice


def test_format_beside_tools_is_of_the_content(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMAS["stop"]}}
    made = client.responses.create(**BODY | {"text": form})
    calls = [item for item in made.output if item.type == "function_call"]
    assert bool(calls) != bool(made.output_text)
    made = client.responses.create(**BODY | {"text": form, "tools": []})
    jsonschema.validate(json.loads(made.output_text), SCHEMAS["stop"])


def test_unusable_schema_of_a_tool_has_its_flat_name(client: openai.OpenAI) -> None:
    tools: Any = [TOOLS[0] | {"parameters": {"uniqueItems": True}}]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(**BODY | {"tools": tools}, tool_choice="required")
    assert refusal.value.param == "tools[0].parameters"
