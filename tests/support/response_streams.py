"""Reads streams of `POST /v1/responses` as they are on the wire, with the ids by which they are resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class ResponseStream:
    """The events that a client has got so far."""

    events: list[dict[str, Any]] = field(default_factory=list)
    last_id: str = ""

    def read(self, url: str, body: dict[str, Any], **headers: str) -> Iterator[dict[str, Any]]:
        """Yield the events of a request, after they were added. With `last_id` the stream is resumed."""
        if self.last_id:
            headers["Last-Event-ID"] = self.last_id
        kind = event_id = ""
        with httpx.stream(
            "POST", f"{url}/v1/responses", json=body | {"stream": True}, headers=headers, timeout=60
        ) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    event_id = value
                elif name == "event":
                    kind = value
                elif name == "data":
                    event = json.loads(value)
                    assert event["type"] == kind
                    self.events.append(event)
                    self.last_id = event_id or self.last_id
                    event_id = ""
                    yield event

    def cut(self) -> None:
        """Forget the events behind the last one with an id: a resumed stream repeats them."""
        number = int(self.last_id.rpartition(":")[2])
        self.events = [event for event in self.events if event["sequence_number"] <= number]

    @property
    def kinds(self) -> list[str]:
        return [event["type"].removeprefix("response.") for event in self.events]

    @property
    def text(self) -> str:
        return "".join(
            event["delta"] for event in self.events if event["type"] == "response.output_text.delta"
        )

    @property
    def response(self) -> dict[str, Any]:
        """Return the whole response of a stream that has ended."""
        made: dict[str, Any] = self.events[-1]["response"]
        return made

    def assert_whole(self) -> None:
        """Assert that no event is missing, and that the response is what its deltas were."""
        numbers = [event["sequence_number"] for event in self.events]
        assert numbers == list(range(len(numbers)))
        texts = [
            part["text"]
            for item in self.response["output"]
            if item["type"] == "message"
            for part in item["content"]
        ]
        assert "".join(texts) == self.text
        assert self.response["id"] == self.events[0]["response"]["id"]


def text_of(response: dict[str, Any]) -> str:
    """Return the text of a whole response."""
    texts = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
    return "".join(texts)
