"""The Session call of api.proto: one session as a stream of requests and their answers.

Made by the Inference service for each call. A step is a GenerateRequest that appends at the stream's position, so it
survives lost servers and lost gateways as any other answer does. Knows neither servers nor other gateways.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, MutableMapping
from contextlib import aclosing

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.grpc.answers import Caller, stream_answer
from modelswarm_gateway.api.grpc.field_names import move_field, rename_field
from modelswarm_gateway.api.grpc.requests import parse_blocks
from modelswarm_gateway.api.grpc.sessions.control import SessionControl
from modelswarm_gateway.api.http.openai_requests import parse_body
from modelswarm_gateway.api.http.sessions import SessionRequest
from modelswarm_gateway.core.interface.turn import Reservation
from modelswarm_gateway.errors import ApiError, Code, invalid_field
from modelswarm_gateway.generation.named_sessions import SessionKey
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_control import open_session
from modelswarm_gateway.metrics.grpc_requests import counted_parts

Responses = AsyncGenerator[api_pb2.SessionResponse, None]

OPEN_SECONDS = 60.0  # seconds to wait for the first request


class SessionStream:
    def __init__(
        self, service: GenerationService, newest: MutableMapping[SessionKey, SessionStream]
    ) -> None:
        """`newest`: the stream that has opened or attached each session last; streams enter themselves."""
        self._service, self._newest = service, newest
        self._control = SessionControl(service, is_forwarded=False)
        self._key: SessionKey | None = None
        self._model = ""
        self._keep = False
        self._blocks: api_pb2.BlockRange | None = None
        self._position = 0
        self._request_timeout = OPEN_SECONDS  # seconds to wait for the next request

    @property
    def model(self) -> str:
        """Return the model of the session, also of one that was refused or is closed; empty before one is asked for."""
        return self._model

    async def answer(self, requests: AsyncIterator[api_pb2.SessionRequest]) -> Responses:
        """Yield the answers to the requests, until one closes the session or no more come. Raise ApiError."""
        while (request := await self._next(requests)) is not None:
            counted = counted_parts(
                self._service.metrics, lambda: self.model, self._answer_one(request)
            )
            async with aclosing(counted) as responses:
                async for response in responses:
                    yield response
            if request.WhichOneof("request") == "close":
                return

    async def _next(
        self, requests: AsyncIterator[api_pb2.SessionRequest]
    ) -> api_pb2.SessionRequest | None:
        """Return the next request; None after the last one. Raise ApiError if none comes while the session is kept."""
        try:
            async with asyncio.timeout(self._request_timeout):
                return await anext(requests, None)
        except TimeoutError as error:
            if self._key is not None:
                raise _expired(self._key) from error
            detail = f"it must come within {OPEN_SECONDS:g} s"
            raise invalid_field("open", detail) from error

    async def free(self) -> None:
        """Free the session at the end of the stream, unless it is kept, or another stream has attached it since.

        A client whose connection broke may be back before the end is noticed. Another gateway may go on with the
        session, so a gateway that stops leaves it. Raise ApiError.
        """
        if self._key is None or self._newest.get(self._key) is not self:
            return
        del self._newest[self._key]
        if not self._keep and self._service.accepting:
            await self._control.close(self._key)

    async def _answer_one(self, request: api_pb2.SessionRequest) -> Responses:
        kind = request.WhichOneof("request")
        if kind is None:
            names = ", ".join(field.name for field in request.DESCRIPTOR.fields)
            raise invalid_field("request", f"one of {names} is required")
        if (kind == "open") != (self._key is None):
            detail = (
                "a stream begins with open"
                if self._key is None
                else "this stream has a session; use another stream for another one"
            )
            raise invalid_field(kind, detail)
        match kind:
            case "open":
                yield await self._open(request.open)
            case "step":
                async with aclosing(self._step(request.step)) as parts:
                    async for part in parts:
                        yield part
            case "rewind":
                yield await self._rewind(request.rewind.position)
            case "state":
                yield await self._state()
            case "fork":
                yield await self._fork(request.fork)
            case "close":
                await self._control.close(self._opened)
                self._newest.pop(self._opened, None)
                self._key = None
                yield api_pb2.SessionResponse(
                    position=self._position, closed=api_pb2.SessionClosed()
                )

    @property
    def _opened(self) -> SessionKey:
        assert self._key is not None
        return self._key

    async def _open(self, wanted: api_pb2.OpenSession) -> api_pb2.SessionResponse:
        self._model = wanted.model
        try:
            if wanted.attach:
                key = await self._attach(wanted)
            else:
                key = await self._reserve(wanted)
        except ApiError as error:
            raise move_field(error, "open", api_pb2.OpenSession.DESCRIPTOR) from error
        self._key, self._keep, self._newest[key] = key, wanted.keep, self
        self._model = key[0]
        opened = await self._state()
        self._blocks = opened.state.blocks if opened.state.HasField("blocks") else None
        self._request_timeout = opened.state.ttl or self._service.settings.idle_seconds
        return opened

    async def _attach(self, wanted: api_pb2.OpenSession) -> SessionKey:
        for field in ("max_length", "ttl", "blocks"):
            if wanted.HasField(field):
                detail = "an attached session has that with which it was opened; leave it out"
                raise invalid_field(field, detail)
        key = self._control.find_key(wanted.model, wanted.session_id)
        self._position = (await self._control.attach(key)).position
        return key

    async def _reserve(self, wanted: api_pb2.OpenSession) -> SessionKey:
        fields = {field.name: value for field, value in wanted.ListFields()}
        fields.pop("keep", None)
        fields.pop("blocks", None)
        blocks = parse_blocks(wanted)
        parsed = parse_body(SessionRequest, fields)
        key = parsed.model, parsed.session_id or f"sess_{secrets.token_hex(12)}"
        ttl = parsed.ttl or max(1, round(self._service.settings.idle_seconds))
        opening = asyncio.ensure_future(
            open_session(self._service, key, Reservation(parsed.max_length, ttl, blocks))
        )
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait({opening})
            if opening.exception() is None:
                self._key, self._newest[key] = key, self  # `free` gives its room back
            raise
        return key

    async def _state(self) -> api_pb2.SessionResponse:
        state = await self._control.show(self._opened)
        state.position = self._position
        return api_pb2.SessionResponse(position=self._position, state=state)

    async def _rewind(self, position: int) -> api_pb2.SessionResponse:
        if position > self._position:
            detail = f"{position}; allowed: 0 to the number of entries, {self._position}"
            raise invalid_field("rewind.position", detail)
        self._position = position
        return await self._state()

    async def _fork(self, wanted: api_pb2.Fork) -> api_pb2.SessionResponse:
        """Fork after the entries that a rewind has left. The servers may hold more."""
        position = wanted.position if wanted.HasField("position") else self._position
        if not 0 < position <= self._position:
            detail = f"{position}; allowed: 1 to the number of entries, {self._position}"
            raise invalid_field("fork.position", detail)
        fork = api_pb2.Fork(session_id=wanted.session_id, position=position)
        forked = await self._control.fork(self._opened, fork)
        return api_pb2.SessionResponse(position=self._position, forked=forked)

    async def _step(self, step: api_pb2.SessionStep) -> Responses:
        try:
            request = _generate_request(step, self._opened, self._position)
            if self._blocks is not None:
                request.blocks.CopyFrom(self._blocks)
            answer = stream_answer(self._service, request, Caller(False, _accept))
            async with aclosing(answer) as parts:
                async for part in parts:
                    self._position = part.position + len(part.token_ids)
                    yield api_pb2.SessionResponse(position=self._position, part=part)
        except ApiError as error:
            step_fields = api_pb2.SessionStep.DESCRIPTOR
            raise move_field(rename_field(error), "step", step_fields) from error


async def _accept() -> None:
    """Do nothing: the answer to `open` has told the client that its call was accepted."""


def _generate_request(
    step: api_pb2.SessionStep, key: SessionKey, position: int
) -> api_pb2.GenerateRequest:
    """Return the request that appends the input of the step."""
    made = api_pb2.GenerateRequest(
        model=key[0], session_id=key[1], append=True, session_position=position
    )
    for field, value in step.ListFields():
        if field.message_type is not None:
            getattr(made, field.name).CopyFrom(value)
        elif field.is_repeated:
            getattr(made, field.name).extend(value)
        else:
            setattr(made, field.name, value)
    return made


def _expired(key: SessionKey) -> ApiError:
    detail = f"the session {key[1]!r} had no request for its ttl; open another one"
    return ApiError(Code.SESSION_EXPIRED, detail, param="session_id")
