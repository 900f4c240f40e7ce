"""`text.format` of responses: the openai client parses answers that follow a schema, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from support.processes.streams import TOY_MODEL
from support.processes.swarm import running_swarm


class Point(BaseModel):
    x: int
    on: bool


ASK: dict[str, Any] = {"model": TOY_MODEL, "input": "a point", "temperature": 0}


@pytest.fixture(scope="module")
def client(toy_folder: Path) -> Iterator[openai.OpenAI]:
    with running_swarm(toy_folder, "response-format", spans=2) as running:
        url = f"http://{running.local.http}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
            yield made


def test_client_parses_the_answer_into_its_model(client: openai.OpenAI) -> None:
    made = client.responses.parse(**ASK, text_format=Point, max_output_tokens=200)
    assert isinstance(made.output_parsed, Point)
    with client.responses.stream(**ASK, text_format=Point, max_output_tokens=200) as stream:
        assert stream.get_final_response().output_parsed == made.output_parsed
    assert made.text is not None and made.text.format is not None
    assert made.text.format.type == "json_schema"


def test_json_object_is_one(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_object"}}
    made = client.responses.create(**ASK | {"temperature": 1}, text=form, max_output_tokens=600)
    if made.status == "completed":
        assert isinstance(json.loads(made.output_text), dict)
    assert made.output_text.startswith("{")
