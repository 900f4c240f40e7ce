"""A chat turn whose stream survives its connection: when that breaks, the turn is resumed behind the last event.

Used by `chat`. The gateway, or the one that takes the session over, continues the text without loss or repetition
(`Last-Event-ID`). Prints nothing and keeps no transcript.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from modelswarm.client.openai import CompletionChunk, ConnectionBrokenError, OpenAIClient
from modelswarm.errors import ModelSwarmError, UnavailableError

# Seconds from a break until the turn is given up.
RECONNECT_SECONDS = 90.0
# Seconds between two tries, unless the gateway names a longer time.
RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Waiting:
    """The clock and the sleep of the retries, and their deadline."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    seconds: float = RECONNECT_SECONDS


def stream_resuming(
    client: OpenAIClient,
    model: str,
    messages: list[dict[str, str]],
    session_id: str,
    *,
    on_break: Callable[[ModelSwarmError], None],
    waiting: Waiting | None = None,
    **fields: Any,
) -> Iterator[CompletionChunk]:
    """Stream one turn of a named session. `on_break` is called at every break, before the first try to resume.

    Raise the last error if the turn could not be resumed until the deadline. Refusals of the first request are raised
    at once.
    """
    waiting = waiting or Waiting()
    last_event_id: str | None = None
    failure: ModelSwarmError | None = None  # of the last try; None while events come
    deadline = 0.0
    while True:
        pause = RETRY_SECONDS
        try:
            for chunk in client.stream_chat(
                model, messages, last_event_id=last_event_id, session_id=session_id, **fields
            ):
                failure = None
                last_event_id = chunk.event_id or last_event_id
                yield chunk
        except ConnectionBrokenError as error:
            if failure is None:
                deadline = waiting.clock() + waiting.seconds
                on_break(error)
            failure = error
        except UnavailableError as error:
            if failure is None:
                raise
            failure, pause = error, max(pause, error.retry_after)
        else:
            return
        if waiting.clock() + pause > deadline:
            raise failure
        waiting.sleep(pause)
