"""Answers one `POST /v1/responses`: plans its turn, runs it as a generation, and stores the response.

A stream is resumed by the id of its last event, which names the session. Errors get the names of this API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.types import Receive

from modelswarm_gateway.api.http.generation_response import GenerationResponse, ResponseFormat
from modelswarm_gateway.api.http.openai_responses import ChatResponseBuilder
from modelswarm_gateway.api.http.relay import ForwardContext, Relay
from modelswarm_gateway.api.http.response_writer import ResponseWriter
from modelswarm_gateway.api.responses.builder import (
    EventId,
    ResponsesBuilder,
    error_event,
    parse_responses_event_id,
)
from modelswarm_gateway.api.responses.chat_names import turn_back
from modelswarm_gateway.api.responses.conversation import (
    Attempt,
    not_found,
    plan_resumed_turn,
    plan_turn,
)
from modelswarm_gateway.api.responses.requests import ResponsesRequest
from modelswarm_gateway.api.responses.response_ids import ResponseId, model_mark, turn_mark
from modelswarm_gateway.api.responses.response_object import ResponseObject
from modelswarm_gateway.api.responses.stored_responses import StoredResponse, StoredResponses
from modelswarm_gateway.errors import ApiError, Code, invalid_request
from modelswarm_gateway.generation.generation import Generation
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.resumption import LAST_EVENT_ID
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_control import check_elsewhere


class ResponsesResponse(GenerationResponse):
    """The response to one request."""

    def __init__(
        self,
        service: GenerationService,
        request: ResponsesRequest,
        stored: StoredResponses,
        *,
        forward: ForwardContext,
        last_event_id: str | None,
        forwarded: bool,
    ) -> None:
        is_stream = bool(request.body.stream)
        if last_event_id is None:
            self._turn = plan_turn(request, stored)
        else:
            after = parse_responses_event_id(last_event_id)
            if not is_stream or not request.is_stored:
                detail = "only the stream of a stored response can be resumed"
                raise invalid_request(LAST_EVENT_ID, f"{LAST_EVENT_ID}: {detail}")
            self._turn = plan_resumed_turn(request, after.response, stored)
        super().__init__(
            service,
            self._attempt.request,
            ChatResponseBuilder,  # of several answers, which no response has
            forward=forward,
            response_format=ResponseFormat(is_stream, usage_in_stream=False, token_ids=False),
        )
        self._parsed, self._stored, self._forwarded = request, stored, forwarded
        self._last_event_id = last_event_id
        self._made: ResponsesBuilder | None = None

    @property
    def _attempt(self) -> Attempt:
        return self._turn.attempts[0]

    @property
    def _after(self) -> EventId | None:
        """Return the last event that the client has."""
        return (
            None if self._last_event_id is None else parse_responses_event_id(self._last_event_id)
        )

    def _resumed_request(self) -> GenerationRequest:
        request = replace(self._attempt.request, forwarded=self._forwarded)
        after = self._after
        if after is None:
            return request
        session = after.response.session_id
        return replace(
            request, session_id=session, resume_after=after.position, resume_mark=after.mark
        )

    async def _generate(self, receive: Receive, writer: ResponseWriter) -> None:
        continued = self._turn.continues
        if continued is not None and not self._stored.claim(continued):
            self._turn = self._turn.on_other_sessions(continued.conversation) or self._turn
            continued = None
        try:
            await super()._generate(receive, writer)
        except ApiError as error:
            raise turn_back(error) from error
        finally:
            if continued is not None:
                self._stored.unclaim(continued)

    async def _start_generation(
        self, disconnected: asyncio.Future[None], writer: ResponseWriter
    ) -> Generation:
        while True:
            self._request = self._resumed_request()
            try:
                await self._check_session()
                return await super()._start_generation(disconnected, writer)
            except ApiError as error:
                turn = self._turn.next_attempt(error)
                if turn is None:
                    raise
                self._turn = turn

    async def _check_session(self) -> None:
        """Wait for the end of the session's turn. Raise OwnedElsewhere or ApiError if it cannot continue here."""
        request, turn = self._request, self._turn
        if request.session_id is None:
            return
        key = request.model, request.session_id
        if turn.continues is not None:  # its last client has the response, and is about to leave
            await self._service.await_turn_end(key)
        is_here = self._service.named_sessions.has_session(key)
        if turn.asks_owner and not is_here and not self._forwarded:
            await check_elsewhere(self._service, key)
        if self._attempt.only_elsewhere and self._last_event_id is None:
            name = str(self._parsed.body.previous_response_id)
            raise not_found(name, self._attempt.only_elsewhere)

    async def _relay(self, relay: Relay, disconnected: asyncio.Future[None]) -> None:
        """Relay the answer of the session's owner. Another try is safe: it goes behind the same turn, or nowhere."""
        await relay.run(self._last_event_id, disconnected)

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        """Return none: the id of the response names its session."""
        return []

    def _make_builder(self, generation: Generation) -> ResponsesBuilder:
        after = self._after
        if self._parsed.body.include and generation.reasoning_tokens is not None:
            detail = (
                "the answers of this model have reasoning beside the text, so log probabilities of the text alone "
                "are not known; use POST /v1/chat/completions"
            )
            raise ApiError(Code.UNSUPPORTED, f"include: {detail}", param="include")
        response_id = ResponseId(
            model=model_mark(self._request.model),
            context=self._parsed.context,
            created=int(time.time()),
            conversation=self._attempt.conversation,
            turn=turn_mark(generation.prompt, generation.sampling.seed),
        )
        made = ResponseObject(
            response_id if after is None else after.response, self._parsed, generation.sampling
        )
        self._made = ResponsesBuilder(made, generation, self._store, after)
        return self._made

    def _store(self, response: Mapping[str, Any]) -> None:
        """Store a response that is whole."""
        if not self._parsed.is_stored:
            return
        known = self._turn.known
        inputs = None if known is None else [*known, *self._parsed.items]
        assert self._made is not None
        self._stored.keep(StoredResponse(self._made.id, response, inputs))

    def _pin_position(self, generation: Generation) -> None:
        """Do nothing: further tries append behind the same turn only, which the id of the response proves."""

    def _error_event(self, failure: ApiError) -> bytes:
        after = self._after
        number = self._made.number if self._made else after.number + 1 if after else 0
        return error_event(failure, number)
