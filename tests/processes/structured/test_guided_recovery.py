"""Guided JSON and forced calls go on unchanged when their tail is killed or drained, or their gateway is killed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import jsonschema
import pytest
from support.models.structured import BODY, SCHEMAS, make_structured_model
from support.processes.swarm import Running, local_settings, running_swarm

from modelswarm.protocol.identity import name_of

PEOPLE: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "minLength": 4, "maxLength": 12},
    "minItems": 8,
    "maxItems": 8,
}
GUIDED = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PEOPLE}}
}
JSON_BODY = {
    name: BODY[name] for name in ("model", "messages", "temperature", "max_tokens")
} | GUIDED
MOVE = {"type": "function", "function": {"name": "move"}}
BODIES = {"json": JSON_BODY, "calls": BODY | {"tool_choice": MOVE}}
KINDS = [pytest.param("json", marks=pytest.mark.full), "calls"]
SEED, HIT_AT = 11, 12  # events with output before the fault
PARTS = 12  # of an answer that is read in pieces


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_structured_model(tmp_path_factory.mktemp("scripted"))
    settings = replace(local_settings("guided", lease=2.0), gateways=2)
    with running_swarm(folder, "guided", spans=2, replicas=2, settings=settings) as made:
        yield made


class Enough(Exception):
    """The client closes its stream."""


@dataclass
class Read:
    """All that a client has read of one answer."""

    text: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    last_id: str = ""
    events: int = 0

    def add(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        self.text += delta.get("content") or ""
        for entry in delta.get("tool_calls", ()):
            call = self.calls.setdefault(entry["index"], {"id": "", "name": "", "arguments": ""})
            call["id"] += entry.get("id", "")
            call["name"] += entry["function"].get("name", "")
            call["arguments"] += entry["function"]["arguments"]
        for each in (choice.get("logprobs") or {}).get("content") or ():
            self.tokens.append(each["token"])
            self.logprobs.append(each["logprob"])
        self.finish = choice["finish_reason"] or self.finish
        self.events += bool(self.text or self.calls)


def stream(
    address: str, body: dict[str, Any], read: Read, on_event: Callable[[int], None] = lambda _: None
) -> None:
    headers = {"Last-Event-ID": read.last_id} if read.last_id else {}
    url = f"http://{address}/v1/chat/completions"
    sent = {**body, "seed": SEED, "logprobs": True, "stream": True}
    with httpx.stream("POST", url, json=sent, headers=headers, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("id: "):
                read.last_id = line[4:]
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    read.add(choice)
                    on_event(read.events)


def check_same(got: Read, calm: Read) -> None:
    assert (got.text, got.calls, got.finish) == (calm.text, calm.calls, calm.finish)
    assert got.tokens == calm.tokens
    assert got.logprobs == pytest.approx(calm.logprobs, abs=1e-3)


def calm_answer(running: Running, kind: str) -> Read:
    running.wait_whole()
    calm = Read()
    stream(running.local.http, BODIES[kind], calm)
    if kind == "json":
        jsonschema.validate(json.loads(calm.text), PEOPLE)
    for call in calm.calls.values():
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    assert calm.events > HIT_AT
    return calm


@pytest.mark.parametrize("kind", KINDS)
def test_killed_tail_changes_nothing(running: Running, kind: str) -> None:
    calm, got = calm_answer(running, kind), Read()
    before = running.faults().resumed

    def hit(events: int) -> None:
        if events == HIT_AT:
            running.kill(running.only_session().route[-1].peer)

    stream(running.local.http, BODIES[kind], got, hit)
    assert running.faults().resumed == before + 1
    check_same(got, calm)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full
def test_drained_tail_changes_nothing(running: Running, kind: str) -> None:
    calm, got, drained = calm_answer(running, kind), Read(), list[str]()

    def hit(events: int) -> None:
        if events == HIT_AT:
            tail = name_of(running.only_session().route[-1].peer)
            states = list(running.view.drain_server(tail, timeout=300))
            assert states[-1].done
            drained.append(tail)

    stream(running.local.http, BODIES[kind], got, hit)
    for tail in drained:
        list(running.view.drain_server(tail, undo=True))
    assert drained
    check_same(got, calm)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_gateway_changes_nothing(running: Running, kind: str) -> None:
    calm, got = calm_answer(running, kind), Read()
    other = running.local.gateway_addresses[1]
    body = BODIES[kind] | {"session_id": f"kept-{kind}"}

    def hit(events: int) -> None:
        if events == HIT_AT:
            running.local.kill(other.name)

    with pytest.raises(httpx.HTTPError):
        stream(other.http, body, got, hit)
    assert not got.finish
    stream(running.local.http, body, got)
    check_same(got, calm)


@pytest.mark.full
def test_tokens_withheld_at_a_gateways_loss_keep_logprobs(running: Running) -> None:
    """The client comes back often: its first event then has many tokens, and may end within a character."""
    calm, got, parts = calm_answer(running, "json"), Read(), list[Read]()
    other = running.local.gateway_addresses[1]
    running.local.wait_ready(60)
    body = JSON_BODY | {"session_id": "pieces"}

    def leave(events: int) -> None:
        if got.text and (not parts or got.text != parts[-1].text):
            time.sleep(0.2)  # the model runs ahead
            raise Enough

    while not got.finish and len(parts) < PARTS:
        with suppress(Enough):
            stream(other.http, body, got, leave)
        parts.append(deepcopy(got))
    assert len(parts) > 1
    running.local.kill(other.name)
    for part in reversed(parts):
        if not part.finish:
            stream(running.local.http, body, part)
            check_same(part, calm)
