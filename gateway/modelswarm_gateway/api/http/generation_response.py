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

from modelswarm_gateway.api.failover import MOVED, Course
from modelswarm_gateway.api.forwarding import Answer, Gone, Original, Passing, Unreachable
from modelswarm_gateway.api.http.openai_responses import Head, Shape, error_event, waiting
from modelswarm_gateway.api.http.sse_reader import Events, id_of, refusal
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
class Looks:
    """How the answer is to look."""

    stream: bool
    usage_in_stream: bool
    token_ids: bool


@dataclass(frozen=True, slots=True)
class Way:
    """How the request is passed on, if another gateway is to answer it."""

    passing: Passing
    original: Original


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.envelope(), error.mapping.status, error.headers())


class Reply(Response):
    """The response of one request to generate; it does the work while it is being sent."""

    def __init__(
        self,
        service: GenerationService,
        ask: GenerationRequest,
        shape: type[Shape],
        *,
        way: Way,
        looks: Looks,
    ) -> None:
        super().__init__()
        self._service, self._ask, self._shape = service, ask, shape
        self._way, self._looks = way, looks
        self._started = False
        self._course = Course(service.clock)
        self._last: str | None = None  # the id of the last event that we have sent

    @property
    def _keepalive(self) -> float:
        """Asked for anew each time: the first server of a model may come while its client waits."""
        return self._service.keepalive_seconds(self._ask.model)

    def _asked(self) -> GenerationRequest:
        """What is to be answered now."""
        if self._last is None:
            return self._ask
        after, mark = parse_event_id(self._last)
        return replace(self._ask, after=after, mark=mark)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: ApiError | None = None
        try:
            await self._generate(receive, send)
        except ApiError as error:
            failure = error
        except Exception:
            log.exception("a request failed by a fault of ours")
            failure = ApiError(Code.INTERNAL, "internal error")
        self._service.metrics.request(self._ask.model, failure.code if failure else None)
        if failure is not None and (failure.code is not Code.CANCELLED or self._ask.forwarded):
            await self._fail(failure, scope, receive, send)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started:
            await _send(send, error_event(error.envelope()), more=False)
        else:
            await error_response(error)(scope, receive, send)

    async def _generate(self, receive: Receive, send: Send) -> None:
        """Here or elsewhere: when whoever answers is gone, the answer goes on behind what the client has of it."""
        left = asyncio.ensure_future(_gone(receive))
        try:
            while not left.done():
                try:
                    return await self._answer(left, send)
                except (Gone, ApiError) as error:
                    await self._course.again(error)
            raise ApiError(Code.CANCELLED, "the client left")
        finally:
            left.cancel()

    async def _answer(self, left: asyncio.Future[None], send: Send) -> None:
        try:
            generation = await self._start(left, send)
        except OwnedElsewhere as elsewhere:
            return await self._pass_on(elsewhere, left, send)
        watcher = asyncio.create_task(_watch(left, generation))
        try:
            head = Head(
                model=self._ask.model,
                created=int(time.time()),
                prompt=generation.prompt,
                usage_in_stream=self._looks.usage_in_stream,
                token_ids=self._looks.token_ids,
            )
            shape = self._shape(head)
            await (self._events if self._looks.stream else self._whole)(generation, shape, send)
        except ApiError as error:
            if error.code is Code.SESSION_ELSEWHERE and not self._ask.forwarded:
                raise Gone from error  # another gateway has just taken it
            raise
        finally:
            watcher.cancel()
            generation.close()

    async def _start(self, left: asyncio.Future[None], send: Send) -> Generation:
        """A session of a gateway that is gone may have to be waited for: then the stream begins with comments."""
        starting = asyncio.ensure_future(self._service.start_generation(self._asked()))
        try:
            first = asyncio.FIRST_COMPLETED
            either: set[asyncio.Future[Any]] = {starting, left}
            while not (await asyncio.wait(either, timeout=self._keepalive, return_when=first))[0]:
                if self._looks.stream and self._ask.session_id is not None:
                    await self._wait(send)
            if not starting.done():  # what it waits for would keep its own return out
                raise ApiError(Code.CANCELLED, "the client left")
            return await starting
        finally:
            if not starting.done():
                starting.cancel()

    async def _wait(self, send: Send) -> None:
        await self._begin(send, list(STREAM_HEADERS))
        await _send(send, waiting(""))

    async def _pass_on(self, elsewhere: OwnedElsewhere, left: asyncio.Future[None], send: Send) -> None:
        """The gateway that has the session answers, while the client is there. Raises Gone if it does so no more."""
        passing = asyncio.ensure_future(self._relay(elsewhere, send))
        try:
            await asyncio.wait({left, passing}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                await passing
        finally:
            passing.cancel()

    async def _relay(self, elsewhere: OwnedElsewhere, send: Send) -> None:
        passing, clock = self._way.passing, self._service.clock
        spoke = clock()

        async def lives() -> bool:
            nonlocal spoke
            if self._looks.stream and clock() - spoke >= self._keepalive:
                await self._wait(send)
                spoke = clock()
            lives = await self._service.is_owned_by(self._ask, elsewhere.http)
            return await passing.answers(elsewhere.http) if lives is None else lives

        try:
            async with passing.on(elsewhere.http, self._way.original, self._last, lives) as answer:
                if self._looks.stream and answer.status == 200:
                    async for part in self._whole_events(answer):
                        await self._begin(send, answer.headers)
                        await _send(send, part)
                        spoke = clock()
                    return await _send(send, b"", more=False)
                body = b"".join([part async for part in answer.parts])
        except Unreachable as error:
            log.warning("a request cannot be passed on: %s", error)
            detail = "the gateway that holds this session cannot be reached"
            raise ApiError(Code.SESSION_ELSEWHERE, detail, retry_after=1.0) from error
        if self._started:  # with comments at least: it is too late for a status
            raise refusal(body)
        await self._begin(send, answer.headers, answer.status)
        await _send(send, body, more=False)

    async def _whole_events(self, answer: Answer) -> AsyncIterator[bytes]:
        """None of them in part. Raises Gone when they stop, ApiError when they end with it."""
        events = Events()
        async for part in answer.parts:
            if whole := events.take(part):
                yield whole
                if events.last is not None:
                    self._told(events.last)
            if events.over:
                return
            if events.error is not None:
                raise Gone if events.error.code in MOVED else events.error
        raise Gone

    def _told(self, last: str) -> None:
        """The client has the event with that id."""
        self._last = last
        self._course.told()

    async def _whole(self, generation: Generation, shape: Shape, send: Send) -> None:
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
        await self._begin(send, headers)
        await _send(send, body, more=False)

    async def _events(self, generation: Generation, shape: Shape, send: Send) -> None:
        piece = await generation.next_chunk(self._keepalive)  # a refusal comes here: nothing is sent yet
        await self._begin(send, list(STREAM_HEADERS))
        opening = shape.opening() if self._asked().resume_after is None else b""
        pending: list[int] = []  # tokens that have shown no text yet
        clock, spoke = self._service.clock, self._service.clock()
        while True:
            event = b""
            if piece is not None:
                pending += piece.tokens
                event = _event(shape, piece, pending)
            if event:
                await _send(send, opening + event)
                self._told(id_of(event))
                opening = b""
                pending.clear()
                spoke = clock()
            elif piece is None or clock() - spoke >= self._keepalive:
                await _send(send, waiting(generation.hold_reason))
                spoke = clock()
            if piece is not None:
                if piece.finish is not None:
                    break
                generation.acknowledge(piece)
            piece = await generation.next_chunk(self._keepalive)
        last = shape.closing(piece.finish, generation.completion_tokens)
        await _send(send, opening + last, more=False)

    async def _begin(
        self, send: Send, headers: list[tuple[bytes, bytes]], status: int = 200
    ) -> None:
        if self._started:
            return
        await send({"type": "http.response.start", "status": status, "headers": headers})
        self._started = True


def _event(shape: Shape, piece: OutputChunk, tokens: list[int]) -> bytes:
    """Nothing for a token that shows no text yet, unless it is the last one."""
    if piece.text or (piece.finish is not None and tokens):
        return shape.event(piece.text, tokens, format_event_id(piece.end - 1, piece.mark))
    return b""


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _gone(receive: Receive) -> None:
    """Until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def _watch(left: asyncio.Future[None], generation: Generation) -> None:
    """Until the client leaves; then its turn ends."""
    await asyncio.shield(left)
    generation.abort(ApiError(Code.CANCELLED, "the client left"))
