"""A reader over HTTP that resumes a broken stream at any gateway, after the last event that it received.

Used by `clients.py` when there are several gateways. It does what browsers do with server-sent events
(`Last-Event-ID`). Knows one named session and one answer.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from support.processes.streams import Answer, Request

TRY_SECONDS = 120.0  # for the whole answer; a gateway may take a minute to start on a busy machine
SILENT_SECONDS = 6.0  # comments come more often, unless the gateway is stopped
PAUSE = 0.2
AGAIN = (404, 409, 429, 503)  # the gateway has just started, or another one still has the session
ELSEWHERE = "session_elsewhere"  # the same as 503, in an event: comments that keep the connection came before
GO_ON = "Last-Event-ID"  # in the message of an error: the answer is at another gateway


@dataclass(slots=True)
class Reader:
    """Reads one answer. `targets`: HTTP of every gateway; `home`: the one where it begins, "" is any."""

    targets: Sequence[str]
    request: Request
    rng: random.Random
    home: str = ""
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    last: str = ""  # id of the last event with tokens
    text: str = ""
    finish: str = ""
    times: list[float] = field(
        default_factory=list
    )  # time.perf_counter, of every event with tokens
    code: str = ""
    details: str = ""
    breaks: int = 0  # of the connection
    torn: int = 0  # ... after the first token

    def read(self) -> None:
        """Read until the answer ends or fails."""
        until = time.monotonic() + TRY_SECONDS
        with httpx.Client(timeout=SILENT_SECONDS) as client:
            while time.monotonic() < until:
                try:
                    if self._once(client):
                        return
                except httpx.TransportError:
                    self._broke()
                time.sleep(PAUSE)
        self.code, self.details = "given_up", f"no end after {TRY_SECONDS:g} s: {self.details}"

    def answer(self) -> Answer:
        return Answer(
            self.request, tuple(self.tokens), tuple(self.positions), self.text, self.finish
        )

    def _broke(self) -> None:
        self.breaks += 1
        self.torn += bool(self.tokens)
        self.home = ""

    def _once(self, client: httpx.Client) -> bool:
        """Read one stream. Return True if the answer has ended."""
        url = f"http://{self.home or self.rng.choice(self.targets)}/v1/completions"
        headers = {"Last-Event-ID": self.last} if self.last else {}
        with client.stream("POST", url, json=_body(self.request), headers=headers) as answer:
            if answer.status_code != 200:
                return self._refused(answer.status_code, json.loads(answer.read())["error"])
            event_id = ""
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line == "data: [DONE]":
                    return True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return self._refused(answer.status_code, event["error"])
                    self._take(event["choices"][0], event_id)
        raise httpx.RemoteProtocolError("it ended without an end mark")

    def _take(self, choice: dict[str, Any], event_id: str) -> None:
        self.text += choice["text"]
        self.finish = choice["finish_reason"] or ""
        tokens = choice.get("token_ids", [])
        if tokens:
            position, self.last = int(event_id.partition("-")[0]), event_id
            self.tokens += tokens
            self.positions += range(position - len(tokens) + 1, position + 1)
            self.times.append(time.perf_counter())

    def _refused(self, status: int, error: dict[str, Any]) -> bool:
        """Return False if the request is to be repeated: the session exists, as some events arrived."""
        self.details = error["message"]
        if GO_ON in self.details and self.tokens and status == 200:
            self._broke()
            return False
        if self.tokens and (status in AGAIN or error["code"] == ELSEWHERE):
            return False
        self.code = error["code"]
        return True


def _body(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "model": request.model,
        "prompt": list(request.prompt),
        "max_tokens": request.new,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "stop": list(request.stop),
        "ignore_eos": not sampling.eos,
        "session_id": request.session,
        "stream": True,
        "return_token_ids": True,
    }
