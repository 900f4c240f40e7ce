"""A swarm of real processes with LoRA adapters: what clients get is what peft's whole model says, with kills too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.adapters import load_with, make_adapter
from support.models.tiny_models import TOY_LENGTH, VOCAB
from support.processes import kill_scenarios
from support.processes.kill_scenarios import SAMPLED, prompt_of
from support.processes.oracles import check_contiguous, check_tokens
from support.processes.streams import Request
from support.processes.swarm import Running, local_settings, running_swarm


@dataclass(frozen=True, slots=True)
class Adapted:
    running: Running
    model: Path
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def adapted(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    root = tmp_path_factory.mktemp("adapters")
    made = {name: make_adapter(toy_folder, root / name, seed=ord(name)) for name in "ab"}
    settings = local_settings("adapters", token_budget=64)
    with running_swarm(
        toy_folder, "adapters", spans=2, replicas=2, settings=settings, adapters=made
    ) as running:
        yield Adapted(running, toy_folder, made)


@pytest.mark.full
def test_streams_of_all_adapters_equal_peft(adapted: Adapted) -> None:
    requests = [
        Request(prompt_of(40 + 7 * at, at, VOCAB), 40, model=name)
        for at, name in enumerate(["toy", "a", "b"] * 2)
    ]
    for answer in adapted.running.ask_all(requests):
        check_contiguous(answer)
        check_tokens(load_with(adapted.model, adapted.adapters.get(answer.request.model)), answer)


def test_kill_under_an_adapter_changes_no_token(adapted: Adapted) -> None:
    prompt = prompt_of(60, 3, VOCAB)
    long = Request(prompt, TOY_LENGTH - len(prompt), SAMPLED, model="a")
    answer = kill_scenarios.kill_in_decode(adapted.running, long, 1, 30)
    check_contiguous(answer)
    check_tokens(load_with(adapted.model, adapted.adapters["a"]), answer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("completions", {"prompt": "hi"}),
        ("responses", {"input": "hi", "max_output_tokens": 8}),
        ("messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}),
    ],
)
def test_every_api_takes_the_name_of_an_adapter(
    adapted: Adapted, path: str, body: dict[str, Any]
) -> None:
    url = f"http://{adapted.running.local.http}/v1/{path}"
    limit = {} if "max_output_tokens" in body else {"max_tokens": 8}
    answers = {}
    for name in ("toy", "a", "b"):
        wanted = {"model": name, "temperature": 0, **limit, **body}
        answer = httpx.post(url, json=wanted, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        answers[name] = text_of(answer.json())
    assert len(set(answers.values())) == 3
    unknown = httpx.post(url, json={**body, "model": "c"}, timeout=60)
    assert unknown.status_code == 404


def text_of(answer: dict[str, Any]) -> str:
    """Return the answer's text, in the form of any API."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice.get("text") or choice["message"]["content"])
    parts = answer["output"][0]["content"] if "output" in answer else answer["content"]
    return str(parts[0]["text"])
