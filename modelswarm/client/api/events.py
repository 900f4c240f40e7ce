"""Server-sent events of a streamed answer. An event counts once its blank line has come.

An event that broke off is sent again when the stream is resumed. Comments only keep the connection open.
"""

from __future__ import annotations

from dataclasses import dataclass

END_OF_STREAM = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    data: bytes
    id: str | None  # a broken stream of a session is resumed behind it


class EventReader:
    """Takes the bytes of one connection as they come. `httpx` would split lines at characters of the text, too."""

    def __init__(self) -> None:
        self._rest = b""  # of a line that is not whole yet
        self._data: list[bytes] = []
        self._id: str | None = None

    def read(self, received: bytes) -> list[Event]:
        """Return the events that are whole now; the last one of a complete stream has the data `[DONE]`."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(Event(b"\n".join(self._data), self._id))
                self._data, self._id = [], None
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif name == b"id":
                self._id = value.removeprefix(b" ").decode("ascii", "replace")
        return events
