"""Chat turns of the page for a browser, at a foreign gateway."""

from __future__ import annotations

import json
from email.message import Message

import httpx
import pytest
from support.eventually import eventually
from support.processes.programs.held_gateway import held_gateway, page_of
from unit.client.api.test_retries import Answer, server

from modelswarm.client.browser.access import Refused, check_call
from modelswarm.client.browser.source import Source

TYPE = {"content-type": "text/event-stream"}


def _chunk(number: int, finish_reason: str | None = None, **delta: str) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return f"id: {number}\ndata: {json.dumps({'choices': [choice]})}\n\n"


def test_reasoning_reaches_the_page_as_it_comes() -> None:
    """Without it a page shows nothing for minutes, and its Stop is noticed at the first text only."""
    content = (
        _chunk(1, reasoning_content="Let me ")
        + _chunk(2, reasoning_content="see.")
        + _chunk(3, content="4")
        + _chunk(4, "stop")
        + "data: [DONE]\n\n"
    )
    with server(Answer(200, content.encode(), TYPE)) as gateway:
        question = [{"role": "user", "content": "2 + 2?"}]
        body = {"model": "m", "messages": question, "session_id": "one"}
        _, events = Source("127.0.0.1:1", gateway.url).chat(body, lambda: False)
        found = [(each.get("reasoning"), each["text"], each["finish_reason"]) for each in events]
    assert found == [
        ("Let me ", "", None),
        ("see.", "", None),
        ("", "4", None),
        ("", "", "stop"),
    ]


def test_earlier_page_is_told_which_address_to_open() -> None:
    """A reload sends the earlier token again."""
    headers = Message()
    headers["Host"], headers["X-ModelSwarm-Token"] = "127.0.0.1:9000", "earlier"
    with pytest.raises(Refused, match="open the address that was printed last"):
        check_call(headers, "present")


def test_stop_before_the_first_token_ends_the_turn() -> None:
    """A held session sends nothing. Its next turn was refused: it was still answering its last request."""
    with held_gateway() as gateway, page_of(gateway) as page:
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "session_id": "one"}
        headers = {"X-ModelSwarm-Token": page.token}
        base = page.url.partition("?")[0]
        with httpx.stream("POST", f"{base}api/chat", json=body, headers=headers, timeout=60):
            eventually("the turn runs", lambda: gateway.asked)
            assert not gateway.client_left.is_set()
        eventually("the gateway is left", gateway.client_left.is_set)
