"""Streams of messages that are held, and streams that cannot be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from support.processes.swarm import BRIEF_HOLD, ENDLESS, MODEL, two_spans

BODY: Any = {
    "model": MODEL,
    "max_tokens": 50_000,
    "messages": [{"role": "user", "content": "go"}],
    "temperature": 1,
}
LONG = 300  # tokens; an answer of so many has not ended when a server is killed at its begin


def seed_of_a_long_answer(url: str) -> int:
    """Return a seed with which the model, which draws its end at random, writes many tokens."""
    for seed in range(100):
        body = {**BODY, "max_tokens": LONG, "seed": seed}
        made = httpx.post(f"{url}/v1/messages", json=body, timeout=60).json()
        if made["stop_reason"] == "max_tokens":
            return seed
    raise AssertionError("no answer was long")


@pytest.mark.full
def test_held_stream_gets_pings_and_ends_with_an_error(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        url = swarm.gateway("--keepalive", "0.3", *BRIEF_HOLD).url
        received: list[str] = []
        body = {**BODY, "stream": True, "seed": seed_of_a_long_answer(url)}
        with httpx.stream("POST", f"{url}/v1/messages", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                received.append(line)
                if "text_delta" in line and swarm.processes["s1"].poll() is None:
                    swarm.kill("s1")
        comment = f": waiting for a route: no server holds blocks 2:4 of {MODEL}"
        held = received.index(comment)
        assert received[held + 1 : held + 4] == ["event: ping", 'data: {"type": "ping"}', ""]
        assert "event: error" in received[held:]
        assert not any("message_stop" in line for line in received)

        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with client, pytest.raises(anthropic.APIStatusError) as refused:
            client.messages.create(model=MODEL, max_tokens=5, messages=BODY["messages"])
        error: Any = refused.value.body
        assert refused.value.status_code == 503
        assert error["error"]["type"] == "overloaded_error"
        assert "no server holds blocks 2:4" in error["error"]["message"]
