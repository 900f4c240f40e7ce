"""The BlockPass call of api.proto: a pass through blocks on one server, which this gateway chooses.

Used by the Inference service. The input goes through to the server and the result back, so that nothing is kept here.
A server that refuses before the input comes is no fault of the call: the next one is asked. Once the input is on its
way, a fault ends the call, and the client repeats it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError

from modelswarm.protocol.block_passes import MAX_SEQUENCES, MESSAGE_BYTES, PASS_METHOD
from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.link.listener import open_call
from modelswarm.protocol.link.stream import CallStatus, MessageStream, StreamBroken
from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.forwarding import PeerGone, await_while_alive
from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.core.interface.views import ServerView
from modelswarm_gateway.errors import (
    ApiError,
    Code,
    gateway_stopping,
    hide_identities,
    invalid_field,
    invalid_request,
)
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.metrics.grpc_requests import counted_parts

# Passes of one gateway at a time.
MAX_PASSES = 256
# Seconds for the next message of the client.
IDLE_TIMEOUT_SECONDS = 60.0

T = TypeVar("T")

Requests = AsyncIterator[api_pb2.BlockPassRequest]
Responses = AsyncGenerator[api_pb2.BlockPassResponse, None]


@dataclass(frozen=True, slots=True)
class _Server:
    """The call of a server that has accepted a pass."""

    view: ServerView
    call: MessageStream
    last: int


class BlockPasses:
    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._running: Counter[PeerId] = Counter()  # passes by server

    async def answer(self, requests: Requests) -> Responses:
        """Yield the responses of one call. Raise ApiError."""
        head = api_pb2.PassHead()
        counted = counted_parts(
            self._service.metrics, lambda: head.model, self._responses(requests, head)
        )
        async with aclosing(counted) as responses:
            async for response in responses:
                yield response

    async def _responses(self, requests: Requests, head: api_pb2.PassHead) -> Responses:
        """Yield the responses of one call. `head` becomes that of the pass."""
        first = await self._next_request(requests, "head")
        if not first.HasField("head"):
            raise invalid_field("head", "the first message must have it")
        head.CopyFrom(first.head)
        card = await self._check(head)
        async with self._accepted(head) as server:
            yield api_pb2.BlockPassResponse(accepted=api_pb2.PassAccepted(last=server.last))
            rows, row_bytes = sum(head.lengths), card.boundary_rows.hidden_bytes
            prompts = (server.last - head.blocks.first) * head.prompt_rows
            left = ((1 + head.backward) * rows + prompts) * row_bytes
            while left > 0:
                part = await self._next_request(requests)
                left -= len(part.data)
                if not 0 < len(part.data) <= MESSAGE_BYTES or left < 0:
                    detail = f"allowed: 1 to {MESSAGE_BYTES}, and no more than the input needs"
                    raise invalid_field("data", f"{len(part.data)} bytes; {detail}")
                await self._await_server(server, server.call.write(part.SerializeToString()))
            left = (rows + head.backward * prompts) * row_bytes
            while left > 0:
                answer = await self._await_server(server, _read_response(server.call))
                if not answer.data:
                    raise _lost("it sent an empty part")
                left -= len(answer.data)
                yield answer

    async def _next_request(
        self, requests: Requests, field: str = "data"
    ) -> api_pb2.BlockPassRequest:
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_SECONDS):
                return await anext(requests)
        except StopAsyncIteration as error:
            raise invalid_request(field, f"{field}: the input ended too early") from error
        except TimeoutError as error:
            detail = f"{field}: nothing came for {IDLE_TIMEOUT_SECONDS:.0f} s"
            raise ApiError(Code.STREAM_UNREAD, detail, param=field) from error

    async def _check(self, head: api_pb2.PassHead) -> ModelCard:
        if not self._service.accepting:
            raise gateway_stopping()
        card, _ = await self._service.wait_for_model(head.model)
        if card.parent:
            detail = f"passes run without adapters; name {card.parent!r}, the model of this one"
            raise ApiError(Code.UNSUPPORTED, f"head.model: {detail}", param="head.model")
        if self._running.total() >= MAX_PASSES:
            detail = f"{MAX_PASSES} passes are running already; retry in 1 s"
            raise ApiError(Code.NO_CAPACITY, detail, retry_after=1.0)
        sizes, first, last = card.boundary_rows, head.blocks.first, head.blocks.last
        if not 0 <= first < last <= card.n_blocks:
            detail = f"allowed: 0 <= first < last <= {card.n_blocks}, the blocks of {card.name!r}"
            raise invalid_field("head.blocks", f"blocks {first}:{last}; {detail}")
        if not 0 < len(head.lengths) <= MAX_SEQUENCES or min(head.lengths) < 1:
            detail = f"allowed: 1 to {MAX_SEQUENCES} sequences of at least 1 row"
            raise invalid_field("head.lengths", detail)
        if max(head.lengths) > card.max_length > 0:
            detail = f"a sequence of {max(head.lengths)} rows; the context has {card.max_length}"
            raise invalid_field("head.lengths", detail)
        if head.prompt_rows > min(head.lengths):
            detail = f"{head.prompt_rows}, and the shortest sequence has {min(head.lengths)} rows"
            raise invalid_field("head.prompt_rows", detail)
        width = sizes.hidden_bytes // sizes.number_bytes
        if (head.dtype, head.hidden_size) != (sizes.dtype, width):
            detail = f"rows have {width} numbers of {sizes.dtype}"
            raise invalid_field("head.dtype", f"{head.dtype!r}; {detail}")
        if head.server:
            raise invalid_field("head.server", "only gateways set it")
        return card

    @asynccontextmanager
    async def _accepted(self, head: api_pb2.PassHead) -> AsyncIterator[_Server]:
        """Find a server that accepts the pass. Raise ApiError if there is none."""
        refusals: list[ApiError] = []
        for view in self._candidates(head):
            self._running[view.peer] += 1
            try:
                async with AsyncExitStack() as stack:
                    try:
                        opening = stack.enter_async_context(open_call(view.target, PASS_METHOD))
                        call = await self._await_peer(view, opening)
                        last = await self._await_peer(view, _begin(call, head, view.peer))
                    except ApiError as error:
                        if error.code is Code.TOO_LARGE:
                            raise
                        refusals.append(error)
                        continue
                    yield _Server(view, call, last)
                    return
            finally:
                self._running -= Counter((view.peer,))  # which drops zeros: servers come and go
        raise _worst(refusals, head)

    def _candidates(self, head: api_pb2.PassHead) -> list[ServerView]:
        """Return the servers that can run the pass: those that run most of its blocks first, then idle ones."""
        first, last = head.blocks.first, head.blocks.last
        found = [
            view
            for view in self._service.backend.servers_of(head.model)
            if view.first <= first < view.last
            and (view.last >= last or not head.backward)
            and not view.suspected
            and not view.drain_cause
        ]

        def order(view: ServerView) -> tuple[bool, int, int, float]:
            busy = self._running[view.peer]
            return view.ejected, -min(view.last, last), busy, random.random()

        return sorted(found, key=order)

    async def _await_server(self, server: _Server, waiting: Awaitable[T]) -> T:
        return await self._await_peer(server.view, waiting)

    async def _await_peer(self, view: ServerView, waiting: Awaitable[T]) -> T:
        """Await something of a server's call. Raise ApiError if the call fails, or the server is lost."""
        peer, model = view.peer, view.model

        async def is_alive() -> bool:
            views = self._service.backend.servers_of(model)
            return any(view.peer == peer and not view.suspected for view in views)

        try:
            return await await_while_alive(waiting, is_alive)
        except PeerGone as error:
            raise _lost("it is silent") from error
        except StreamBroken as error:
            raise _translate(error) from error
        except ValueError as error:
            raise _lost("its address is not valid") from error


async def _begin(call: MessageStream, head: api_pb2.PassHead, peer: PeerId) -> int:
    """Send the head to a server, and return the end of the blocks that it runs."""
    own = api_pb2.PassHead()
    own.CopyFrom(head)
    own.server = peer
    await call.write(api_pb2.BlockPassRequest(head=own).SerializeToString())
    answer = await _read_response(call)
    last: int = answer.accepted.last
    return last


async def _read_response(call: MessageStream) -> api_pb2.BlockPassResponse:
    try:
        return api_pb2.BlockPassResponse.FromString(bytes(await call.read()))
    except DecodeError as error:
        raise StreamBroken("it sent no BlockPassResponse") from error


def _translate(error: StreamBroken) -> ApiError:
    sentence = hide_identities(str(error) or "no reason was given")
    match error.status:
        case CallStatus.INVALID_ARGUMENT:
            return ApiError(Code.TOO_LARGE, f"head.lengths: {sentence}", param="head.lengths")
        case CallStatus.RESOURCE_EXHAUSTED:
            return ApiError(Code.NO_CAPACITY, f"{sentence}; retry in 1 s", retry_after=1.0)
        case CallStatus.FAILED_PRECONDITION:
            return ApiError(Code.BLOCKS_UNCOVERED, sentence, param="head.blocks")
        case CallStatus.UNIMPLEMENTED:
            return ApiError(Code.UNSUPPORTED, f"head.model: {sentence}", param="head.model")
        case CallStatus.INTERNAL:
            return ApiError(Code.STREAM_BROKEN, sentence)
    return _lost(sentence)


def _lost(reason: str) -> ApiError:
    detail = f"the server of this pass was lost ({reason}); repeat the call"
    return ApiError(Code.NO_SERVERS, detail, retry_after=0.2)


def _worst(refusals: list[ApiError], head: api_pb2.PassHead) -> ApiError:
    """Return the error of a pass that no server runs: the one that a retry may help most."""
    for code in (Code.NO_CAPACITY, Code.NO_SERVERS, Code.BLOCKS_UNCOVERED):
        for error in refusals:
            if error.code is code:
                return error
    if refusals:
        return refusals[0]
    first, last = head.blocks.first, head.blocks.last
    if head.backward and last - first > 1:
        detail = f"no server has all blocks {first}:{last} now"
        return ApiError(Code.BLOCKS_UNCOVERED, f"head.blocks: {detail}", param="head.blocks")
    detail = f"no server for block {first} now; retry in 1 s"
    return ApiError(Code.NO_SERVERS, detail, retry_after=1.0)
