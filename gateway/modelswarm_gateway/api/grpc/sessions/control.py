"""Shows, forks and closes sessions for gRPC clients: here, or at the gateway that holds the session.

Used by the Inference service and by the stream of a session. Knows no tokens.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from grpc import aio

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.api.failover import MOVED_CODES
from modelswarm_gateway.api.forwarding import (
    CALL_SECONDS,
    FORWARDED_HEADER,
    READ_SECONDS,
    PeerGone,
    await_while_alive,
)
from modelswarm_gateway.api.grpc.field_names import move_field
from modelswarm_gateway.api.grpc.forwarding import OWN_CONNECTION, is_responding, read_error
from modelswarm_gateway.api.http.openai_requests import parse_body
from modelswarm_gateway.api.http.sessions import ForkRequest
from modelswarm_gateway.errors import ApiError, Code, invalid_request
from modelswarm_gateway.generation.named_sessions import SessionKey
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_control import (
    SessionState,
    attach_session,
    close_session,
    fork_session,
    owner_not_reached,
    session_not_found,
    session_state,
)
from modelswarm_gateway.generation.session_locator import WAIT_SECONDS, OwnedElsewhere

# Seconds between two tries to reach the gateway of a session that is attached.
PAUSE_SECONDS = 0.5
Answer = TypeVar("Answer")


class SessionControl:
    """The calls about one session that run no turn. They raise ApiError."""

    def __init__(self, service: GenerationService, *, is_forwarded: bool) -> None:
        self._service, self._is_forwarded = service, is_forwarded

    def find_key(self, model: str, session_id: str) -> SessionKey:
        """Return model and name of the session. The only model of a gateway need not be named."""
        names = [card.name for card in self._service.backend.model_cards()]
        if not model and len(names) == 1:
            model = names[0]
        for field, value in (("model", model), ("session_id", session_id)):
            if not value:
                raise invalid_request(field, f"{field}: this field is required")
        return model, session_id

    async def show(self, key: SessionKey) -> api_pb2.SessionState:
        """Return the state of the session, wherever it is."""
        try:
            return await self._state(key, session_state)
        except PeerGone as error:
            raise owner_not_reached() from error

    async def attach(self, key: SessionKey) -> api_pb2.SessionState:
        """Return the state of the session, which is taken over first if its gateway was lost.

        A gateway that has just stopped counts as the owner until its lease ends.
        """
        deadline = self._service.clock() + WAIT_SECONDS
        while True:
            try:
                return await self._state(key, attach_session)
            except PeerGone as error:
                if self._service.clock() >= deadline:
                    raise owner_not_reached() from error
            await asyncio.sleep(PAUSE_SECONDS)

    async def _state(
        self,
        key: SessionKey,
        read: Callable[[GenerationService, SessionKey], Awaitable[SessionState | None]],
    ) -> api_pb2.SessionState:
        try:
            found = await read(self._service, key)
        except OwnedElsewhere as elsewhere:
            return await self._forward(elsewhere, lambda stub: stub.GetSession, _name(key))
        if found is None:
            raise session_not_found(key)
        return _message(found, key)

    async def close(self, key: SessionKey) -> None:
        """Free the session's room, wherever it is."""
        try:
            found = await close_session(self._service, key)
        except OwnedElsewhere as elsewhere:
            try:
                await self._forward(elsewhere, lambda stub: stub.CloseSession, _name(key))
            except PeerGone as error:
                raise owner_not_reached() from error
            return
        if not found:
            raise session_not_found(key)

    async def fork(self, key: SessionKey, wanted: api_pb2.Fork) -> api_pb2.SessionState:
        """Open another session with the log of this one, wherever it is, and return its state."""
        fields = {field.name: value for field, value in wanted.ListFields()}
        try:
            parsed = parse_body(ForkRequest, fields)
        except ApiError as error:
            raise _in_fork(error) from error
        new = key[0], parsed.session_id or f"sess_{secrets.token_hex(12)}"
        forking = asyncio.ensure_future(self._fork(key, new, parsed.position))
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            await asyncio.wait({forking})
            if forking.exception() is None:
                with suppress(ApiError):
                    await self.close(new)  # its client does not know it
            raise

    async def _fork(
        self, key: SessionKey, new: SessionKey, position: int | None
    ) -> api_pb2.SessionState:
        try:
            found = await fork_session(self._service, key, new, position)
        except OwnedElsewhere as elsewhere:
            fork = api_pb2.Fork(session_id=new[1], position=position)
            request = api_pb2.ForkSessionRequest(model=key[0], session_id=key[1], fork=fork)
            try:
                return await self._forward(
                    elsewhere, lambda stub: stub.ForkSession, request, READ_SECONDS
                )
            except PeerGone as error:
                raise owner_not_reached() from error
        except ApiError as error:
            if error.code in (Code.SESSION_EXISTS, Code.SESSION_LOST):  # others are of the parent
                raise _in_fork(error) from error
            raise
        if not found:
            raise session_not_found(key)
        return await self.show(new)

    async def _forward(
        self,
        elsewhere: OwnedElsewhere,
        method: Callable[[Any], Callable[..., Awaitable[Answer]]],
        request: api_pb2.SessionName | api_pb2.ForkSessionRequest,
        seconds: float = CALL_SECONDS,
    ) -> Answer:
        """Return the answer of the gateway that holds the session. Raise PeerGone if it is stopping or gone.

        A fork, which copies KV, may take longer than other calls: it is awaited while that gateway responds.
        """
        if self._is_forwarded or not elsewhere.grpc:
            raise owner_not_reached() from elsewhere
        mark = ((FORWARDED_HEADER, "1"),)
        async with aio.insecure_channel(elsewhere.grpc, options=OWN_CONNECTION) as channel:
            call = method(api_pb2_grpc.InferenceStub(channel))
            try:
                return await await_while_alive(
                    call(request, metadata=mark, timeout=seconds),
                    partial(is_responding, elsewhere.grpc),
                )
            except aio.AioRpcError as error:
                failure = read_error(error)
                if failure is None or failure.code in MOVED_CODES:
                    raise PeerGone from error
                raise failure from error


def _name(key: SessionKey) -> api_pb2.SessionName:
    return api_pb2.SessionName(model=key[0], session_id=key[1])


def _in_fork(error: ApiError) -> ApiError:
    return move_field(error, "fork", api_pb2.Fork.DESCRIPTOR)


def _message(found: SessionState, key: SessionKey) -> api_pb2.SessionState:
    shown: dict[str, Any] = found.describe(key)
    route = [api_pb2.SessionHop(**hop) for hop in shown["route"]]
    same = ("model", "state", "position", "max_length", "ttl", "expires_at", "epoch", "reroutes")
    values = {name: shown[name] for name in same}
    state = api_pb2.SessionState(session_id=shown["id"], route=route, **values)
    blocks = None if found.kept is None else found.kept.turn.blocks
    if blocks is not None:
        state.blocks.CopyFrom(api_pb2.BlockRange(first=blocks.first, last=blocks.last))
    return state
