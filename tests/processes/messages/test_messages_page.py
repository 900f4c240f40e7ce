"""The examples of docs/reference/messages.md, run against a real swarm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.models.scripted import make_scripted_model
from support.processes.programs.page_examples import python_examples, run_example
from support.processes.streams import TOY_MODEL
from support.processes.swarm import running_swarm

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "messages.md").read_text("utf-8")
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% endfor %}{% endfor %}<|assistant|>"
)
ANSWER = (
    'Let me see.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Berlin"}}</tool_call>'
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_scripted_model(tmp_path_factory.mktemp("scripted"), ANSWER, TEMPLATE)
    with running_swarm(folder, "page", spans=1, replicas=1) as made:
        yield f"http://{made.local.http}"


def test_client_example_prints_blocks_and_text(url: str) -> None:
    (example,) = python_examples(PAGE)
    printed = run_example(example.replace("MODEL", TOY_MODEL), "http://127.0.0.1:8000", url)
    assert "text {'text': 'Let me see.'" in printed
    assert "'input': {'city': 'Berlin'}" in printed
    assert printed.endswith("Let me see.tool_use\n")


def test_plain_request_gets_a_message(url: str) -> None:
    (body,) = re.findall(r"-d '\n(.*?)'\n```", PAGE, re.DOTALL)
    asked = json.loads(body.replace("MODEL", TOY_MODEL))
    answer = httpx.post(f"{url}/v1/messages", json=asked, timeout=60).json()
    assert answer["usage"]["output_tokens"] == 20
    assert answer["stop_reason"] == "max_tokens"
