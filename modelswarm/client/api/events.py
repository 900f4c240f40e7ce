"""Server-sent events of a streamed answer. An event counts once its blank line has come.

An event that broke off is sent again when the stream is resumed. Comments only keep the connection open.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

END_OF_STREAM = "[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    data: str
    id: str | None  # a broken stream of a session is resumed behind it


async def read_events(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    """Yield all whole events; the last one of a complete stream has the data `[DONE]`."""
    data: list[str] = []
    event_id: str | None = None
    async for line in lines:
        if not line:
            if data:
                yield Event("\n".join(data), event_id)
            data, event_id = [], None
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "id":
            event_id = value
