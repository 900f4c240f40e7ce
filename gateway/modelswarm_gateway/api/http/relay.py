"""Relays the response of another gateway, which owns the request's session, to the client (R20, takeover).

Used by a generation's response. A stream is cut between events, so that another try can go on behind the last whole
one. Knows no sessions; the service tells whether the other gateway still owns this one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from modelswarm_gateway.api.failover import MOVED_CODES
from modelswarm_gateway.api.forwarding import (
    ForwardedResponse,
    Forwarder,
    OriginalRequest,
    PeerGone,
    PeerUnreachable,
)
from modelswarm_gateway.api.http.request_log import REQUEST_ID
from modelswarm_gateway.api.http.response_writer import ResponseWriter
from modelswarm_gateway.api.http.sse_reader import SseReader, parse_error_body
from modelswarm_gateway.errors import ApiError, Code, client_left, gateway_stopping
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.service import GenerationService

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Forwarder and original request, used if another gateway has to answer."""

    forwarder: Forwarder
    original: OriginalRequest


class Relay:
    """One try to get the response from the gateway at `target`."""

    def __init__(
        self,
        service: GenerationService,
        request: GenerationRequest,
        forward: ForwardContext,
        target: str,
        writer: ResponseWriter,
        *,
        stream: bool,
        on_delivered: Callable[[str], None],
    ) -> None:
        """`on_delivered` is called with the id of the last event that was sent to the client."""
        self._service, self._request, self._forward = service, request, forward
        self._target, self._writer, self._stream = target, writer, stream
        self._on_delivered = on_delivered
        self._last_sent_at = service.clock()

    async def run(self, last_event_id: str | None, disconnected: asyncio.Future[None]) -> None:
        """Relay what follows the event `last_event_id`, until the end or until the client disconnects.

        Raise PeerGone if the other gateway stops answering, or ApiError: also if this one stops first.
        """
        relaying = asyncio.ensure_future(self._relay(last_event_id))
        with self._service.forwarding() as stopping:
            try:
                either: set[asyncio.Future[None]] = {disconnected, relaying, stopping}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if relaying.done():
                    return await relaying
                if stopping.done():
                    raise gateway_stopping()
                raise client_left()
            finally:
                relaying.cancel()

    async def _relay(self, last_event_id: str | None) -> None:
        forwarder, original = self._forward.forwarder, self._forward.original
        try:
            async with forwarder.forward(
                self._target, original, last_event_id, self._is_alive
            ) as response:
                if self._stream and response.status == 200:
                    return await self._relay_stream(response)
                body = b"".join([part async for part in response.parts])
        except PeerUnreachable as error:
            log.warning("cannot forward request %s: %s", original.headers[REQUEST_ID], error)
            detail = "the gateway that holds this session cannot be reached"
            raise ApiError(Code.SESSION_ELSEWHERE, detail, retry_after=1.0) from error
        if self._writer.has_started:  # with comments at least: it is too late for a status
            raise parse_error_body(body)
        await self._writer.start(response.headers, response.status)
        await self._writer.write(body, more=False)

    async def _relay_stream(self, response: ForwardedResponse) -> None:
        async for part in self._whole_events(response):
            await self._writer.start_stream()
            await self._writer.write(part)
            self._last_sent_at = self._service.clock()
        await self._writer.write(b"", more=False)

    async def _whole_events(self, response: ForwardedResponse) -> AsyncIterator[bytes]:
        """Yield bytes up to the end of an event. Raise PeerGone if they stop early, or the ApiError they end with."""
        reader = SseReader()
        async for part in response.parts:
            if whole := reader.add_bytes(part):
                yield whole
                if reader.last_event_id is not None:
                    self._on_delivered(reader.last_event_id)
            if reader.is_done:
                return
            if reader.error is not None:
                raise PeerGone if reader.error.code in MOVED_CODES else reader.error
        raise PeerGone

    async def _is_alive(self) -> bool:
        """Return whether the other gateway still owns the session; sends the client a keepalive when one is due."""
        clock = self._service.clock
        keepalive = self._service.keepalive_seconds(self._request.model)
        if self._stream and clock() - self._last_sent_at >= keepalive:
            await self._writer.write_keepalive()
            self._last_sent_at = clock()
        owns = await self._service.is_owned_by(self._request, self._target)
        return await self._forward.forwarder.is_responding(self._target) if owns is None else owns
