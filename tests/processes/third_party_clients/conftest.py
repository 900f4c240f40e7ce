"""A swarm whose model reasons, writes a text and calls two tools, for the clients of other projects."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from support.models.scripted import make_scripted_model
from support.processes.swarm import Running, running_swarm

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments.items() | list }}"
    "{% endfor %}{% endfor %}<|assistant|>{# <think></think> #}"
)
CALL = json.dumps({"name": "get_weather", "arguments": {"city": "Berlin", "days": 3}})
ANSWER = (
    f"<think>\nWhich city?\n</think>\n\nLet me see.\n<tool_call>\n{CALL}\n</tool_call>\n"
    '<tool_call>{"name": "clock" }</tool_call>'
)


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_scripted_model(tmp_path_factory.mktemp("scripted"), ANSWER, TEMPLATE)
    with running_swarm(folder, "clients", spans=2, replicas=2) as made:
        yield made


@pytest.fixture(scope="package")
def url(running: Running) -> str:
    return f"http://{running.local.http}"
