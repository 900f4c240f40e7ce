"""A gateway of `modelswarm up` is killed: its streams resume at the next one without a lease's wait (R19, leases)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.models.tiny_models import make_model
from support.processes.http_requests import READ_ON, tokens_of
from support.processes.swarm import HASH, plan

from modelswarm.local.run_folder import GATEWAY_JOB
from modelswarm.local.swarm import LocalSwarm

START_SECONDS = 120.0  # on a busy machine
LEASE = 3600.0  # seconds; longer than any test
LEAVE = object()  # returned by `then` to stop reading
CONTEXT = 50_000  # positions; no answer ends before its test
BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "go",
    "session_id": "talk",
    "temperature": 0.0,
    "max_tokens": CONTEXT - 100,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": True,
}


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSwarm]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = make_model(tmp_path / "model", "llama", max_position_embeddings=CONTEXT)
    with LocalSwarm(plan(folder, spans=2, replicas=1), replace(HASH, lease=LEASE)) as running:
        yield running


def text_of(line: str) -> str:
    return "".join(choice["text"] for choice in json.loads(line[6:])["choices"])


@dataclass
class Reading:
    """Everything that a client has received, over several connections."""

    swarm: LocalSwarm
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    last: str = ""  # id of the last complete event

    def read(self, body: dict[str, Any], count: int, then: Callable[[], object]) -> None:
        """Read until the connection ends. After `count` more tokens call `then` once."""
        headers = {"Last-Event-ID": self.last} if self.last else {}
        url = f"http://{self.swarm.http}/v1/completions"
        limit = len(self.tokens) + count
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", url, json=body, headers=headers) as answer,
        ):
            answer.raise_for_status()
            self._read_events(answer, limit, then)

    def _read_events(self, answer: httpx.Response, limit: int, then: Callable[[], object]) -> None:
        event, text, tokens, is_over = "", "", [], False
        for line in answer.iter_lines():
            if line.startswith("id: "):
                event = line[4:]
            elif line.startswith("data: {"):
                text, tokens = text_of(line), tokens_of(line)
            elif not line:  # the event is complete
                self.text, self.tokens = self.text + text, [*self.tokens, *tokens]
                self.last, text, tokens = event, "", []
                if len(self.tokens) >= limit and not is_over:
                    is_over = True
                    if then() is LEAVE:
                        return


def read_until_killed(swarm: LocalSwarm, reading: Reading) -> bool:
    """Kill the gateway in the middle of the stream. Return False if no gateway resumes it yet."""
    before = len(reading.tokens)
    try:
        reading.read(BODY, READ_ON, lambda: swarm.kill(GATEWAY_JOB))
    except httpx.HTTPStatusError:
        return False
    except httpx.TransportError:  # the gateway was killed, or does not listen yet
        return len(reading.tokens) >= before + READ_ON
    raise AssertionError("the stream ended although its gateway was killed")


@pytest.mark.full
def test_resume_after_gateway_kills_needs_no_lease(swarm: LocalSwarm) -> None:
    reading = Reading(swarm)
    for _ in range(3):
        before = swarm.gateway.incarnation
        eventually(
            "the stream goes on", lambda: read_until_killed(swarm, reading), seconds=START_SECONDS
        )
        assert swarm.wait_replaced(GATEWAY_JOB, before, START_SECONDS)

    undisturbed = Reading(swarm)
    eventually("a gateway is linked", lambda: can_answer(swarm), seconds=START_SECONDS)
    undisturbed.read(BODY | {"session_id": "other"}, len(reading.tokens), lambda: LEAVE)
    assert len(reading.tokens) >= 3 * READ_ON
    assert undisturbed.tokens[: len(reading.tokens)] == reading.tokens
    assert undisturbed.text.startswith(reading.text)


def can_answer(swarm: LocalSwarm) -> bool:
    return httpx.get(f"http://{swarm.http}/ready", timeout=60).status_code == 200
