"""Server-sent events of another gateway, cut where a reader can go on behind them (R17).

Used where an HTTP answer is passed on. Never gives out half an event: who takes over writes the next one whole.
"""

from __future__ import annotations

import json
from typing import Any

from modelswarm_gateway.errors import ApiError, Code, parse_code


class SseReader:
    """`last` is the id of the last event that was given out."""

    def __init__(self) -> None:
        self.last_event_id: str | None = None
        self.is_done = False  # its end mark was given out
        self.error: ApiError | None = None  # it ended with this one, which is not given out
        self._buffer = b""

    def add_bytes(self, part: bytes) -> bytes:
        """What may be passed on now: comments, and all up to an event with an id or to the end mark. What has no id of
        its own (the opening, the finish reason) stays with what does, so that nothing comes twice.
        """
        self._buffer += part
        at = end = 0
        said, over = "", False
        while (stop := self._buffer.find(b"\n", at)) >= 0:
            line, first = self._buffer[at:stop], at == end
            at = stop + 1
            if line.startswith(b"id: "):
                said = line[4:].decode()
            elif line.startswith(b'data: {"error"'):
                self.error = parse_error_body(line[6:])
            elif line == b"data: [DONE]":
                over = True
            elif first and line.startswith(b":"):
                end = at
            elif not line and (said or over):
                self.last_event_id, self.is_done, end = said or self.last_event_id, over, at
                said = ""
        whole, self._buffer = self._buffer[:end], self._buffer[end:]
        return whole


def parse_event_id_line(event: bytes) -> str:
    """Of one that begins with it."""
    return event[len(b"id: ") : event.index(b"\n")].decode()


def parse_error_body(body: bytes) -> ApiError:
    """What an error envelope says."""
    try:
        error: dict[str, Any] = json.loads(body)["error"]
        return ApiError(parse_code(error["code"]), str(error["message"]), param=error.get("param"))
    except (ValueError, LookupError, TypeError, AttributeError):
        return ApiError(Code.INTERNAL, "the gateway that holds this session refused without words")
