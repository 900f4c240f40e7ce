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
        # Bytes that were not returned. The last events of a response have its whole text, some of them with scores.
        self._buffer = bytearray()
        self._at = 0  # begin of the line that is read
        self._searched = 0  # end of what was searched for its end
        self._event_id, self._is_last = "", False  # of the event that is read

    def add_bytes(self, part: bytes) -> bytes:
        """Return the bytes that may be forwarded now: comments, and all up to an event with an id or the end mark.

        Events without an id (the opening, the finish reason) stay with the next one that has an id, so that no event
        is sent twice.
        """
        self._buffer += part
        end = 0
        while (stop := self._buffer.find(b"\n", self._searched)) >= 0:
            line, first = bytes(self._buffer[self._at : stop]), self._at == end
            self._at = self._searched = stop + 1
            if line.startswith(b"id: "):
                self._event_id = line[4:].decode()
            elif line.startswith(b'data: {"error"'):
                self.error = parse_error_body(line[6:])
            elif line in LAST_LINES:
                self._is_last = True
            elif first and line.startswith(b":"):
                end = self._at
            elif not line and (self._event_id or self._is_last):
                self.last_event_id = self._event_id or self.last_event_id
                self.is_done, self._event_id, end = self._is_last, "", self._at
        self._searched = len(self._buffer)
        whole = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._at, self._searched = self._at - end, self._searched - end
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
