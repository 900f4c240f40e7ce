"""Writes the response and the stream events of one generation, in the shape of OpenAI's Responses API.

Used by `response.py`. The id of an SSE event names the response, the log position that it reaches, and its number.
That is all that another gateway needs to go on behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelswarm_gateway.api.http.choices import NO_TEXT
from modelswarm_gateway.api.http.logprobs_json import TokenNames, chat_logprobs
from modelswarm_gateway.api.http.openai_responses import Events, Logprobs, Tokens
from modelswarm_gateway.api.responses.output_items import OutputItems
from modelswarm_gateway.api.responses.response_ids import ResponseId, parse_response_id
from modelswarm_gateway.api.responses.response_object import ResponseObject, Usage
from modelswarm_gateway.errors import ApiError, invalid_request
from modelswarm_gateway.generation.generation import Generation
from modelswarm_gateway.generation.resumption import LAST_EVENT_ID, parse_event_id


@dataclass(frozen=True, slots=True)
class EventId:
    """Place of an event in a stream that can be resumed."""

    response: ResponseId
    position: int
    mark: str
    number: int  # of the event


def parse_responses_event_id(value: str) -> EventId:
    """Parse the id of an event. Raise ApiError."""
    parts = value.strip().split(":")
    response = parse_response_id(parts[0]) if len(parts) == 3 else None
    if response is None or not parts[2].isdecimal() or len(parts[2]) > 15:
        detail = f"{value[:120]!r} is not the id of an event in the stream of a stored response"
        raise invalid_request(LAST_EVENT_ID, f"{LAST_EVENT_ID}: {detail}")
    position, mark = parse_event_id(parts[1])
    return EventId(response, position, mark, int(parts[2]))


def error_event(error: ApiError, number: int) -> bytes:
    """Return the event that ends a stream which cannot be saved. OpenAI's clients raise what is in `error`."""
    envelope = error.envelope()
    details = {"type": "error", "code": error.code.value, "message": error.message}
    content = {**envelope, **details, "param": error.param, "sequence_number": number}
    return f"event: error\ndata: {json.dumps(content)}\n\n".encode()


class ResponsesBuilder:
    """Builds one response; its number of events goes on where a resumed stream was cut."""

    def __init__(
        self,
        made: ResponseObject,
        generation: Generation,
        on_end: Callable[[Mapping[str, Any]], None],
        after: EventId | None,
    ) -> None:
        """`on_end` is called with the whole response. `after`: the last event that the client has."""
        self._made, self._generation, self._on_end = made, generation, on_end
        self.number = 0 if after is None else after.number + 1  # of the next event
        self._finish = ""
        self._items = OutputItems(made.id)
        self._items.add_output(generation.seen.output, self._entries(generation.seen.logprobs))

    @property
    def id(self) -> ResponseId:
        return self._made.id

    def opening(self) -> bytes:
        response = self._made.in_progress()
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event({"type": kind, "response": response}) for kind in kinds)

    def output_event(
        self, output: Events, tokens: Tokens, event_id: str, logprobs: Logprobs = ()
    ) -> bytes:
        events = self._items.add_output(output, self._entries(logprobs))
        if not events:
            return b""
        written = [self._event(event) for event in events]
        if not event_id:
            return b"".join(written)
        mark = f"{self._made.id}:{event_id}:{self.number - 1}"
        return b"".join((*written[:-1], f"id: {mark}\n".encode(), written[-1]))

    def finish_event(self, finish: str) -> bytes:
        self._finish = finish
        events = self._items.finish(is_complete=self._is_complete)
        return b"".join(self._event(event) for event in events)

    def end_events(self, completion: int) -> bytes:
        response = self._end(completion)
        return self._event({"type": f"response.{response['status']}", "response": response})

    def choice(
        self, output: Events, tokens: Tokens, finish: str, logprobs: Logprobs = ()
    ) -> dict[str, Any]:
        self._items.add_output(output or NO_TEXT, self._entries(logprobs))
        self.finish_event(finish)
        return {}

    def body(self, choices: Sequence[dict[str, Any]], completion: int) -> dict[str, Any]:
        return self._end(completion)

    @property
    def _is_complete(self) -> bool:
        return self._finish != "length"

    def _end(self, completion: int) -> dict[str, Any]:
        usage = Usage(
            prompt=len(self._generation.prompt),
            cached=self._generation.cached_tokens,
            completion=completion,
            reasoning=self._generation.reasoning_tokens or 0,
        )
        response = self._made.ended(self._items.items, usage, is_complete=self._is_complete)
        self._on_end(response)
        return response

    def _entries(self, logprobs: Logprobs) -> list[Any]:
        if not self._made.request.body.include:
            return []
        names = TokenNames(self._generation.tokenizer.token_bytes)
        return list(chat_logprobs(logprobs, names)["content"])

    def _event(self, fields: Mapping[str, Any]) -> bytes:
        content = json.dumps({**fields, "sequence_number": self.number})
        self.number += 1
        return f"event: {fields['type']}\ndata: {content}\n\n".encode()
