"""One streamed turn that survives its connection: it is resumed behind the last event, at any gateway.

A turn without a session gets one with a random name, because only a session's stream can be resumed. It is closed at
the end of the turn. The chunks of all connections together are those of an undisturbed stream.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from modelswarm.client.api.answers import Chunk
from modelswarm.client.api.connection import Connections, OpenAnswer, envelope_error
from modelswarm.client.api.errors import (
    ApiError,
    ConnectionBrokenError,
    ErrorFacts,
    GatewayUnreachableError,
    NotAGatewayError,
)
from modelswarm.client.api.events import END_OF_STREAM, Event, EventReader
from modelswarm.client.api.parsing import parse_chunks, parse_with
from modelswarm.client.api.retries import MOVED_CODES, OnBreak, Retries

NAME_PREFIX = "turn-"
# Seconds without a byte until a stream that can be resumed counts as broken. Gateways send comments every 5 s.
SILENCE_SECONDS = 60.0
CloseSession = Callable[[str, str], None]


class Turn:
    """`body` has all fields of the request, with the model. `close_session` takes model and name, and closes later."""

    def __init__(
        self,
        connections: Connections,
        path: str,
        body: Mapping[str, Any],
        max_retries: int,
        close_session: CloseSession,
        on_break: OnBreak | None = None,
    ) -> None:
        self._connections = connections
        self._path = path
        self._body = dict(body) | {"stream": True, "stream_options": {"include_usage": True}}
        self._close_session = close_session
        self._has_own_session = "session_id" not in body and body.get("n", 1) == 1
        self._is_resumable = self._has_own_session or "session_id" in body
        self._appends_again = bool(body.get("append")) and "session_position" not in body
        self._retries = Retries(max_retries, on_break=on_break)
        self._after: str | None = None  # id of the last event whose chunks were yielded
        self._has_yielded = False
        self._may_be_open = False  # the session of this turn, at some gateway
        self._has_prompt = False  # its tokens were yielded
        self.request_id: str | None = None  # of the last connection

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of the whole turn. Raise ApiError if it can neither begin nor be resumed."""
        self._rename()
        try:
            while True:
                try:
                    async with aclosing(self._read_once()) as chunks:
                        async for chunk in chunks:
                            yield chunk
                    return
                except ApiError as error:
                    failure = error
                self._may_be_open |= _may_have_begun(failure)
                await self._retries.before_retry(
                    failure,
                    is_repeatable=self._is_repeatable,
                    is_unanswered=self._after is None and not self._has_yielded,
                )
                if self._after is None:  # a new name need not wait for the lease of a lost gateway
                    self._free()
                    self._rename()
        except asyncio.CancelledError:
            self._may_be_open = True  # the request may have been sent
            raise
        finally:
            self._free()

    @property
    def _is_repeatable(self) -> bool:
        """Return whether the request may be sent again, with the last event's id if there is one."""
        if self._is_resumable:
            return self._after is not None or not self._appends_again
        return not self._has_yielded

    def _rename(self) -> None:
        """Give a turn without a session of its caller a new one."""
        if self._has_own_session:
            self._body["session_id"] = f"{NAME_PREFIX}{secrets.token_hex(12)}"

    def _free(self) -> None:
        """Close the turn's own session, if a gateway may have it."""
        if self._has_own_session and self._may_be_open:
            self._close_session(self._body["model"], self._body["session_id"])
            self._may_be_open = False

    async def _read_once(self) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of one connection, from the last event on.

        Chunks of events without an id are held back until the next id, or the end: they come again after a break.
        """
        headers = {} if self._after is None else {"Last-Event-ID": self._after}
        silence = SILENCE_SECONDS if self._is_resumable else None
        held: list[Chunk] = []
        async with self._connections.stream(
            "POST", self._path, self._body, headers=headers, silence=silence
        ) as opened:
            self._on_opened(opened)
            reader = EventReader()
            async for received in opened.http.aiter_bytes():
                for event in reader.read(received):
                    is_end = event.data == END_OF_STREAM
                    if not is_end:
                        held += self._parse(event, opened)
                        if event.id is None and self._is_resumable:
                            continue
                        self._retries.on_progress()
                        self._after = event.id if self._is_resumable else None
                    ready, held = held, []
                    for chunk in ready:
                        self._has_yielded = True
                        self._has_prompt |= chunk.prompt_token_ids is not None
                        yield chunk
                    if is_end:
                        return
            self._connections.avoid(opened.url)
            message = f"the stream of {opened.url} ended early"
            raise ConnectionBrokenError(message, opened.url, ErrorFacts(request_id=self.request_id))

    def _on_opened(self, opened: OpenAnswer) -> None:
        self.request_id = opened.request_id
        self._may_be_open = True
        self._retries.on_begun()

    def _parse(self, event: Event, opened: OpenAnswer) -> list[Chunk]:
        """Return the chunks of an event that show something. Raise ApiError for an error event."""
        facts = ErrorFacts(request_id=self.request_id)

        def parse(body: Mapping[str, Any]) -> list[Chunk]:
            if "error" not in body:
                return parse_chunks(body)
            error = envelope_error(body, facts)
            if error.code in MOVED_CODES:
                self._connections.avoid(opened.url)
            raise error

        try:
            chunks = parse_with(parse, event.data)
        except ValueError as error:
            message = f"{opened.url} sends a stream, but not as a gateway does"
            raise NotAGatewayError(message, opened.url, facts) from error
        if self._has_prompt and self._is_resumable:
            chunks = [replace(chunk, prompt_token_ids=None) for chunk in chunks]
        return [chunk for chunk in chunks if not chunk.is_empty]


def _may_have_begun(error: ApiError) -> bool:
    """Return whether a request with this failure may have begun its turn."""
    return isinstance(error, ConnectionBrokenError) and not isinstance(
        error, GatewayUnreachableError
    )
