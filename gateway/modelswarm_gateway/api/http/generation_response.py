"""Runs one generation as the response to one HTTP request: whole, or as server-sent events.

Used by the HTTP API. A response that has not started fails with a status; one that has started ends with a single error
event and no end mark (I8). A client that disconnects ends its turn at once, streamed or not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from modelswarm_gateway.api.failover import StreamFailover
from modelswarm_gateway.api.fields.session_header import session_headers
from modelswarm_gateway.api.forwarding import PeerGone
from modelswarm_gateway.api.http.choices import AnswerBuilder, Choices, PendingOutput
from modelswarm_gateway.api.http.logprobs_json import TokenNames, prompt_logprobs
from modelswarm_gateway.api.http.openai_responses import (
    PromptEntries,
    ResponseBuilder,
    ResponseHead,
    error_event,
    keepalive_comment,
)
from modelswarm_gateway.api.http.relay import ForwardContext, Relay
from modelswarm_gateway.api.http.request_log import REQUEST_ID, set_model, set_outcome
from modelswarm_gateway.api.http.response_writer import ResponseWriter
from modelswarm_gateway.api.http.sse_reader import parse_event_id_line
from modelswarm_gateway.errors import ApiError, Code, client_left
from modelswarm_gateway.generation.continuation import append_unknown
from modelswarm_gateway.generation.generation import Generation
from modelswarm_gateway.generation.output.logprobs import TokenLogprob
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.resumption import parse_event_id
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_control import owner_not_reached
from modelswarm_gateway.generation.session_locator import OwnedElsewhere
from modelswarm_gateway.generation.tool_calls.events import OutputEvent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Options of the request that shape the response."""

    stream: bool
    usage_in_stream: bool
    token_ids: bool
    n: int = 1  # answers to the prompt
    usage_in_events: bool = False  # each event has the usage so far
    names_as_ids: bool = False  # log probabilities name tokens by their ids
    prompt_logprobs: int | None = None  # top alternatives to report; None: no report


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.envelope(), error.mapping.status, error.headers())


class GenerationResponse(Response):
    """The response of one generation request. The work is done while the response is sent."""

    def __init__(
        self,
        service: GenerationService,
        request: GenerationRequest,
        builder: type[ResponseBuilder],
        *,
        forward: ForwardContext,
        response_format: ResponseFormat,
        others: Sequence[GenerationRequest] = (),
    ) -> None:
        """`others`: requests with further prompts, which have no sessions."""
        super().__init__()
        self._others = others
        self._service, self._request, self._builder = service, request, builder
        self._forward, self._format = forward, response_format
        self._failover = StreamFailover(service.clock)
        self._last_event_id: str | None = None  # of the last event sent to the client

    @property
    def _keepalive(self) -> float:
        """Seconds. Read at each use: the first server of a model may connect while a client waits."""
        return self._service.keepalive_seconds(self._request.model)

    def _resumed_request(self) -> GenerationRequest:
        """Return the request for what follows the events that the client has."""
        if self._last_event_id is None:
            return self._request
        after, mark = parse_event_id(self._last_event_id)
        return replace(self._request, resume_after=after, resume_mark=mark)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: ApiError | None = None
        own_headers = self._own_headers()
        writer = ResponseWriter(send, own_headers, self._format_keepalive)
        try:
            await self._generate(receive, writer)
        except ApiError as error:
            failure = error
        except Exception:
            request_id = self._forward.original.headers[REQUEST_ID]
            log.exception("internal error while answering request %s", request_id)
            failure = ApiError(Code.INTERNAL, "internal error")
        set_model(scope, self._request.model)
        if failure is not None:
            set_outcome(scope, failure.code)
        if failure is not None and failure.code is not Code.CANCELLED:  # else the client has left
            if writer.has_started:
                await writer.write(self._error_event(failure), more=False)
            else:
                response = self._error_response(failure)
                response.raw_headers += own_headers
                await response(scope, receive, send)

    async def _generate(self, receive: Receive, writer: ResponseWriter) -> None:
        """Answer here or by another gateway. When the answering gateway is gone, go on behind what the client has."""
        disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            while not disconnected.done():
                try:
                    return await self._answer(disconnected, writer)
                except (PeerGone, ApiError) as error:
                    await self._failover.before_retry(error)
            raise client_left()
        finally:
            disconnected.cancel()

    async def _answer(self, disconnected: asyncio.Future[None], writer: ResponseWriter) -> None:
        try:
            generation = await self._start_generation(disconnected, writer)
        except OwnedElsewhere as elsewhere:
            if not elsewhere.http:
                raise owner_not_reached() from elsewhere
            relay = Relay(
                self._service,
                self._request,
                self._forward,
                elsewhere.http,
                writer,
                stream=self._format.stream,
                on_delivered=self._on_delivered,
            )
            return await self._relay(relay, disconnected)
        self._pin_position(generation)
        generations = [generation]
        watcher = asyncio.create_task(_abort_on_disconnect(disconnected, generations))
        try:
            if self._format.n > 1 or self._others:
                self._service.start_choices(generations, self._format.n)
                await self._start_others(generations, disconnected)
                await self._send_choices(generations, writer)
            else:
                send = self._send_stream if self._format.stream else self._send_body
                await send(generation, self._make_builder(generation), writer)
        except ApiError as error:
            if error.code is Code.SESSION_ELSEWHERE and not self._request.forwarded:
                raise PeerGone from error  # another gateway has just taken the session over
            raise
        finally:
            watcher.cancel()
            for each in generations:
                each.close()

    async def _start_others(
        self, generations: list[Generation], disconnected: asyncio.Future[None]
    ) -> None:
        """Start the answers to the other prompts. The caller closes what was started, also after an error."""
        for request in self._others:
            begun = [await self._service.start_generation(request)]
            try:
                self._service.start_choices(begun, self._format.n)
            finally:
                generations += begun
            if disconnected.done():
                raise client_left()

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of every answer, errors too."""
        return session_headers(self._request.session_id)

    def _make_builder(self, generation: Generation) -> AnswerBuilder:
        """Return the builder of the only answer. Raise ApiError if the answer cannot be written."""
        return self._builder(self._head([generation]))

    def _error_event(self, failure: ApiError) -> bytes:
        return error_event(failure.envelope())

    def _error_response(self, failure: ApiError) -> Response:
        return error_response(failure)

    def _format_keepalive(self, reason: str) -> bytes:
        """Return what keeps a stream alive while it waits for this reason, which may be ""."""
        return keepalive_comment(reason)

    def _head(self, generations: Sequence[Generation]) -> ResponseHead:
        names = TokenNames(generations[0].tokenizer.token_bytes, self._format.names_as_ids)
        top = self._format.prompt_logprobs

        def scores(index: int) -> PromptEntries:
            return prompt_logprobs(generations[index].prompt_logprobs, top or 0, names)

        def completed(index: int) -> int:
            return generations[index].completion_tokens

        def cached(index: int) -> int:
            return generations[index].cached_tokens

        return ResponseHead(
            model=self._request.model,
            created=int(time.time()),
            prompts=[each.prompt for each in generations],
            answers_per_prompt=self._format.n,
            usage_in_stream=self._format.usage_in_stream,
            token_ids=self._format.token_ids,
            names=None if self._request.options.logprobs is None else names,
            reasoning_tokens=lambda: _reasoning_tokens(generations),
            cached_tokens=cached,
            prompt_logprobs=None if top is None else scores,
            tokens_so_far=completed if self._format.usage_in_events else None,
        )

    async def _send_choices(
        self, generations: Sequence[Generation], writer: ResponseWriter
    ) -> None:
        head = self._head(generations)
        first = self._builder(head)
        others = [self._builder(head, index, first) for index in range(1, len(generations))]
        choices = Choices(generations, [first, *others], self._service.clock)
        send = choices.send_stream if self._format.stream else choices.send_body
        await send(writer, self._keepalive)

    async def _relay(self, relay: Relay, disconnected: asyncio.Future[None]) -> None:
        try:
            await relay.run(self._last_event_id, disconnected)
        except PeerGone as error:
            if self._request.append and self._request.position is None and not self._last_event_id:
                raise append_unknown() from error  # another try could append the input twice
            raise

    def _pin_position(self, generation: Generation) -> None:
        """Make further tries append the input at the same position, so that none appends it twice."""
        if generation.position is None or self._request.position is not None:
            return
        self._request = replace(self._request, position=generation.position)
        original = self._forward.original
        assert isinstance(original.body, dict)
        body = original.body | {"session_position": generation.position}
        self._forward = replace(self._forward, original=replace(original, body=body))

    async def _start_generation(
        self, disconnected: asyncio.Future[None], writer: ResponseWriter
    ) -> Generation:
        """Start the generation. While it waits for a session of another gateway, the stream begins with comments."""
        starting = asyncio.ensure_future(self._service.start_generation(self._resumed_request()))
        try:
            first = asyncio.FIRST_COMPLETED
            either: set[asyncio.Future[Any]] = {starting, disconnected}
            while not (await asyncio.wait(either, timeout=self._keepalive, return_when=first))[0]:
                if self._format.stream and self._request.session_id is not None:
                    await writer.write_keepalive()
            if not starting.done():  # left running, it would refuse this client's next try as busy
                raise client_left()
            return await starting
        finally:
            if not starting.done():
                starting.cancel()

    def _on_delivered(self, last: str) -> None:
        """Record that the client has the event with this id."""
        self._last_event_id = last
        self._failover.on_delivered()

    async def _send_body(
        self, generation: Generation, builder: AnswerBuilder, writer: ResponseWriter
    ) -> None:
        output: list[OutputEvent] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        finish: str | None = None
        while finish is None:
            chunk = await generation.next_chunk(self._keepalive)
            if chunk is not None:
                output += chunk.output
                tokens += chunk.tokens
                logprobs += chunk.logprobs
                finish = chunk.finish
                generation.acknowledge(chunk)
        choice = builder.choice(output, tokens, finish, logprobs)
        await writer.write_json(builder.body([choice], len(tokens)))

    async def _send_stream(
        self, generation: Generation, builder: AnswerBuilder, writer: ResponseWriter
    ) -> None:
        # A refusal is raised here, before anything is sent.
        chunk = await generation.next_chunk(self._keepalive)
        await writer.start_stream()
        begins, opening = self._resumed_request().resume_after is None, b""
        pending = PendingOutput()
        clock, last_sent_at = self._service.clock, self._service.clock()
        while True:
            event = b""
            if chunk is not None:
                if begins:  # not before the servers have told what they still had
                    opening, begins = builder.opening(), False
                event = pending.format_chunk(builder, chunk)
            if event:
                await writer.write(opening + event)
                if self._request.session_id is not None:
                    self._on_delivered(parse_event_id_line(event))
                opening = b""
                last_sent_at = clock()
            elif chunk is None or clock() - last_sent_at >= self._keepalive:
                await writer.write_keepalive(generation.hold_reason)
                last_sent_at = clock()
            if chunk is not None:
                if chunk.finish is not None:
                    break
                generation.acknowledge(chunk)
            chunk = await generation.next_chunk(self._keepalive)
        last = builder.finish_event(chunk.finish) + builder.end_events(generation.completion_tokens)
        await writer.write(opening + last, more=False)


def _reasoning_tokens(generations: Sequence[Generation]) -> int | None:
    counts = [each.reasoning_tokens for each in generations]
    return None if counts[0] is None else sum(count or 0 for count in counts)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def _abort_on_disconnect(
    disconnected: asyncio.Future[None], generations: Sequence[Generation]
) -> None:
    """End the turns when the client disconnects."""
    await asyncio.shield(disconnected)
    for generation in generations:
        generation.abort(client_left())
