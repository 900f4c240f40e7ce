"""Runs one generation as the answer to one HTTP request: whole, or as server-sent events.

Used by the HTTP door. An answer that has not begun fails with a status; one that has begun ends with a single error
event and no end mark (I8). A client that leaves ends its turn at once, streamed or not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from modelswarm_gateway.api.failover import MOVED_CODES, StreamFailover
from modelswarm_gateway.api.forwarding import (
    ForwardedResponse,
    Forwarder,
    OriginalRequest,
    PeerGone,
    PeerUnreachable,
)
from modelswarm_gateway.api.http.openai_responses import (
    ResponseBuilder,
    ResponseHead,
    error_event,
    keepalive_comment,
)
from modelswarm_gateway.api.http.sse_reader import SseReader, parse_error_body, parse_event_id_line
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.generation import Generation, OutputChunk
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.resumption import format_event_id, parse_event_id
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_locator import OwnedElsewhere

log = logging.getLogger(__name__)

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """How the answer is to look."""

    stream: bool
    usage_in_stream: bool
    token_ids: bool


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """How the request is passed on, if another gateway is to answer it."""

    forwarder: Forwarder
    original: OriginalRequest


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.envelope(), error.mapping.status, error.headers())


class GenerationResponse(Response):
    """The response of one request to generate; it does the work while it is being sent."""

    def __init__(
        self,
        service: GenerationService,
        request: GenerationRequest,
        builder: type[ResponseBuilder],
        *,
        forward: ForwardContext,
        response_format: ResponseFormat,
    ) -> None:
        super().__init__()
        self._service, self._request, self._builder = service, request, builder
        self._forward, self._format = forward, response_format
        self._started = False
        self._failover = StreamFailover(service.clock)
        self._last_event_id: str | None = None  # the id of the last event that we have sent

    @property
    def _keepalive(self) -> float:
        """Asked for anew each time: the first server of a model may come while its client waits."""
        return self._service.keepalive_seconds(self._request.model)

    def _resumed_request(self) -> GenerationRequest:
        """What is to be answered now."""
        if self._last_event_id is None:
            return self._request
        after, mark = parse_event_id(self._last_event_id)
        return replace(self._request, resume_after=after, resume_mark=mark)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: ApiError | None = None
        try:
            await self._generate(receive, send)
        except ApiError as error:
            failure = error
        except Exception:
            log.exception("a request failed by a fault of ours")
            failure = ApiError(Code.INTERNAL, "internal error")
        self._service.metrics.count_request(self._request.model, failure.code if failure else None)
        if failure is not None and (failure.code is not Code.CANCELLED or self._request.forwarded):
            await self._send_error(failure, scope, receive, send)

    async def _send_error(
        self, error: ApiError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if self._started:
            await _send(send, error_event(error.envelope()), more=False)
        else:
            await error_response(error)(scope, receive, send)

    async def _generate(self, receive: Receive, send: Send) -> None:
        """Here or elsewhere: when whoever answers is gone, the answer goes on behind what the client has of it."""
        left = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            while not left.done():
                try:
                    return await self._answer(left, send)
                except (PeerGone, ApiError) as error:
                    await self._failover.before_retry(error)
            raise ApiError(Code.CANCELLED, "the client left")
        finally:
            left.cancel()

    async def _answer(self, left: asyncio.Future[None], send: Send) -> None:
        try:
            generation = await self._start_generation(left, send)
        except OwnedElsewhere as elsewhere:
            return await self._pass_on(elsewhere, left, send)
        watcher = asyncio.create_task(_abort_on_disconnect(left, generation))
        try:
            head = ResponseHead(
                model=self._request.model,
                created=int(time.time()),
                prompt=generation.prompt,
                usage_in_stream=self._format.usage_in_stream,
                token_ids=self._format.token_ids,
            )
            shape = self._builder(head)
            await (self._send_stream if self._format.stream else self._send_body)(
                generation, shape, send
            )
        except ApiError as error:
            if error.code is Code.SESSION_ELSEWHERE and not self._request.forwarded:
                raise PeerGone from error  # another gateway has just taken it
            raise
        finally:
            watcher.cancel()
            generation.close()

    async def _start_generation(self, left: asyncio.Future[None], send: Send) -> Generation:
        """A session of a gateway that is gone may have to be waited for: then the stream begins with comments."""
        starting = asyncio.ensure_future(self._service.start_generation(self._resumed_request()))
        try:
            first = asyncio.FIRST_COMPLETED
            either: set[asyncio.Future[Any]] = {starting, left}
            while not (await asyncio.wait(either, timeout=self._keepalive, return_when=first))[0]:
                if self._format.stream and self._request.session_id is not None:
                    await self._send_keepalive(send)
            if not starting.done():  # what it waits for would keep its own return out
                raise ApiError(Code.CANCELLED, "the client left")
            return await starting
        finally:
            if not starting.done():
                starting.cancel()

    async def _send_keepalive(self, send: Send) -> None:
        await self._start_response(send, list(STREAM_HEADERS))
        await _send(send, keepalive_comment(""))

    async def _pass_on(
        self, elsewhere: OwnedElsewhere, left: asyncio.Future[None], send: Send
    ) -> None:
        """The gateway that has the session answers, while the client is there. Raises Gone if it does so no more."""
        passing = asyncio.ensure_future(self._relay(elsewhere, send))
        try:
            await asyncio.wait({left, passing}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                await passing
        finally:
            passing.cancel()

    async def _relay(self, elsewhere: OwnedElsewhere, send: Send) -> None:
        passing, clock = self._forward.forwarder, self._service.clock
        spoke = clock()

        async def lives() -> bool:
            nonlocal spoke
            if self._format.stream and clock() - spoke >= self._keepalive:
                await self._send_keepalive(send)
                spoke = clock()
            lives = await self._service.is_owned_by(self._request, elsewhere.http)
            return await passing.is_responding(elsewhere.http) if lives is None else lives

        try:
            async with passing.forward(
                elsewhere.http, self._forward.original, self._last_event_id, lives
            ) as answer:
                if self._format.stream and answer.status == 200:
                    async for part in self._whole_events(answer):
                        await self._start_response(send, answer.headers)
                        await _send(send, part)
                        spoke = clock()
                    return await _send(send, b"", more=False)
                body = b"".join([part async for part in answer.parts])
        except PeerUnreachable as error:
            log.warning("a request cannot be passed on: %s", error)
            detail = "the gateway that holds this session cannot be reached"
            raise ApiError(Code.SESSION_ELSEWHERE, detail, retry_after=1.0) from error
        if self._started:  # with comments at least: it is too late for a status
            raise parse_error_body(body)
        await self._start_response(send, answer.headers, answer.status)
        await _send(send, body, more=False)

    async def _whole_events(self, answer: ForwardedResponse) -> AsyncIterator[bytes]:
        """None of them in part. Raises Gone when they stop, ApiError when they end with it."""
        events = SseReader()
        async for part in answer.parts:
            if whole := events.add_bytes(part):
                yield whole
                if events.last_event_id is not None:
                    self._on_delivered(events.last_event_id)
            if events.is_done:
                return
            if events.error is not None:
                raise PeerGone if events.error.code in MOVED_CODES else events.error
        raise PeerGone

    def _on_delivered(self, last: str) -> None:
        """The client has the event with that id."""
        self._last_event_id = last
        self._failover.on_delivered()

    async def _send_body(self, generation: Generation, shape: ResponseBuilder, send: Send) -> None:
        texts: list[str] = []
        tokens: list[int] = []
        finish: str | None = None
        while finish is None:
            piece = await generation.next_chunk(self._keepalive)
            if piece is not None:
                texts.append(piece.text)
                tokens += piece.tokens
                finish = piece.finish
                generation.acknowledge(piece)
        body = shape.body("".join(texts), tokens, finish)
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await self._start_response(send, headers)
        await _send(send, body, more=False)

    async def _send_stream(
        self, generation: Generation, shape: ResponseBuilder, send: Send
    ) -> None:
        piece = await generation.next_chunk(
            self._keepalive
        )  # a refusal comes here: nothing is sent yet
        await self._start_response(send, list(STREAM_HEADERS))
        opening = shape.opening() if self._resumed_request().resume_after is None else b""
        pending: list[int] = []  # tokens that have shown no text yet
        clock, spoke = self._service.clock, self._service.clock()
        while True:
            event = b""
            if piece is not None:
                pending += piece.tokens
                event = _format_chunk(shape, piece, pending)
            if event:
                await _send(send, opening + event)
                self._on_delivered(parse_event_id_line(event))
                opening = b""
                pending.clear()
                spoke = clock()
            elif piece is None or clock() - spoke >= self._keepalive:
                await _send(send, keepalive_comment(generation.hold_reason))
                spoke = clock()
            if piece is not None:
                if piece.finish is not None:
                    break
                generation.acknowledge(piece)
            piece = await generation.next_chunk(self._keepalive)
        last = shape.closing(piece.finish, generation.completion_tokens)
        await _send(send, opening + last, more=False)

    async def _start_response(
        self, send: Send, headers: list[tuple[bytes, bytes]], status: int = 200
    ) -> None:
        if self._started:
            return
        await send({"type": "http.response.start", "status": status, "headers": headers})
        self._started = True


def _format_chunk(shape: ResponseBuilder, piece: OutputChunk, tokens: list[int]) -> bytes:
    """Nothing for a token that shows no text yet, unless it is the last one."""
    if piece.text or (piece.finish is not None and tokens):
        return shape.text_event(piece.text, tokens, format_event_id(piece.end - 1, piece.mark))
    return b""


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _wait_for_disconnect(receive: Receive) -> None:
    """Until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def _abort_on_disconnect(left: asyncio.Future[None], generation: Generation) -> None:
    """Until the client leaves; then its turn ends."""
    await asyncio.shield(left)
    generation.abort(ApiError(Code.CANCELLED, "the client left"))
