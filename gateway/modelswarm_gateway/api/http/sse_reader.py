"""Reads server-sent events of another gateway and cuts them where a stream can be resumed (R17, sampling).

Used by the relay. Never returns half an event: the gateway that continues the stream writes the next event whole. Knows
no sessions.
"""

from __future__ import annotations

import json
from typing import Any

from modelswarm_gateway.errors import ApiError, Code, parse_code

# Lines of the last event of a stream: of completions, and of responses.
LAST_LINES = (
    b"data: [DONE]",
    b"event: response.completed",
    b"event: response.incomplete",
)


class SseReader:
    """`last_event_id` is the id of the last event that was returned."""

    def __init__(self) -> None:
        self.last_event_id: str | None = None
        self.is_done = False  # the end mark was returned
        self.error: ApiError | None = None  # the error that ended the stream; not returned as bytes
        self._buffer = b""

    def add_bytes(self, part: bytes) -> bytes:
        """Return the bytes that may be forwarded now: comments, and all up to an event with an id or the end mark.

        Events without an id (the opening, the finish reason) stay with the next one that has an id, so that no event
        is sent twice.
        """
        self._buffer += part
        at = end = 0
        event_id, is_done = "", False
        while (stop := self._buffer.find(b"\n", at)) >= 0:
            line, first = self._buffer[at:stop], at == end
            at = stop + 1
            if line.startswith(b"id: "):
                event_id = line[4:].decode()
            elif line.startswith(b'data: {"error"'):
                self.error = parse_error_body(line[6:])
            elif line in LAST_LINES:
                is_done = True
            elif first and line.startswith(b":"):
                end = at
            elif not line and (event_id or is_done):
                self.last_event_id, self.is_done, end = event_id or self.last_event_id, is_done, at
                event_id = ""
        whole, self._buffer = self._buffer[:end], self._buffer[end:]
        return whole


def parse_event_id_line(event: bytes) -> str:
    """Return the id of the last one of some events, which begins with its id line."""
    start = event.rindex(b"\nid: ") + 5 if b"\nid: " in event else len(b"id: ")
    return event[start : event.index(b"\n", start)].decode()


def parse_error_body(body: bytes) -> ApiError:
    """Return the error of an error envelope."""
    try:
        error: dict[str, Any] = json.loads(body)["error"]
        return ApiError(parse_code(error["code"]), str(error["message"]), param=error.get("param"))
    except (ValueError, LookupError, TypeError, AttributeError):
        return ApiError(
            Code.INTERNAL, "the gateway that holds this session refused without a reason"
        )
