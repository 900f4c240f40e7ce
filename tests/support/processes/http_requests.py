"""Requests that the tests of the HTTP door send again and again, and how they read the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
from support.processes.swarm import CONTEXT, MODEL, Doors

LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "go",
    "max_tokens": CONTEXT - 2,
    "ignore_eos": True,
}
IDS: dict[str, Any] = LONG | {"return_token_ids": True}
WIDE = 2 * CONTEXT  # the context that SLOW needs; its sessions need 47 pages
SLOW: dict[str, Any] = IDS | {"max_tokens": 750}
"""Some two seconds, for who does something in the midst of it and may itself be kept waiting for a processor."""


def lines(doors: Doors, body: dict[str, Any]) -> Iterator[str]:
    """The lines of a stream, as they come."""
    with (
        httpx.Client(timeout=30) as client,
        client.stream(
            "POST", f"{doors.url}/v1/completions", json=body | {"stream": True}
        ) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        yield from (line for line in answer.iter_lines() if line)


def tokens_of(line: str) -> list[int]:
    if not line.startswith("data: {"):
        return []
    choices = json.loads(line.removeprefix("data: "))["choices"]
    ids: list[int] = choices[0].get("token_ids", []) if choices else []
    return ids


def whole(doors: Doors, body: dict[str, Any]) -> list[int]:
    answer = httpx.post(f"{doors.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids
