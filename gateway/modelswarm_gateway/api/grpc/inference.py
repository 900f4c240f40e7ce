"""The Inference service of api.proto: one generation as one response or as a stream.

Added to the server by `server.py`. A call whose session another gateway owns is forwarded there. Knows neither sessions
nor servers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

from grpc import aio

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.grpc.answers import Caller, stream_answer
from modelswarm_gateway.api.grpc.block_passes import BlockPasses
from modelswarm_gateway.api.grpc.field_names import rename_field
from modelswarm_gateway.api.grpc.forwarding import is_forwarded
from modelswarm_gateway.api.grpc.model_calls import ModelCalls
from modelswarm_gateway.api.grpc.requests import check_stream, check_unary, count_answers
from modelswarm_gateway.api.grpc.responses import join_parts
from modelswarm_gateway.api.grpc.sessions.control import SessionControl
from modelswarm_gateway.api.grpc.sessions.stream import SessionStream
from modelswarm_gateway.api.grpc.status import Context, abort_call
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.named_sessions import SessionKey
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.metrics.grpc_requests import counted_parts

log = logging.getLogger(__name__)
Response = TypeVar("Response")


class Inference(ModelCalls):
    def __init__(self, service: GenerationService) -> None:
        super().__init__(service)
        self._ending: set[asyncio.Task[None]] = set()
        self._newest_streams: dict[SessionKey, SessionStream] = {}
        self._passes = BlockPasses(service)

    async def Generate(
        self, request: api_pb2.GenerateRequest, context: Context
    ) -> api_pb2.GenerateResponse:
        parts = [part async for part in self._answer(request, context, check_unary)]
        if not parts:
            return api_pb2.GenerateResponse()  # the call was aborted
        return join_parts(parts, count_answers(request))

    async def GenerateStream(
        self, request: api_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[api_pb2.GenerateResponse]:
        async for part in self._answer(request, context, check_stream):
            yield part

    async def Session(
        self, requests: AsyncIterator[api_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[api_pb2.SessionResponse]:
        stream = SessionStream(self._service, self._newest_streams)
        answer = _stream_or_abort(stream.answer(requests), context, lambda: self._free(stream))
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response

    async def BlockPass(
        self, requests: AsyncIterator[api_pb2.BlockPassRequest], context: Context
    ) -> AsyncIterator[api_pb2.BlockPassResponse]:
        answer = _stream_or_abort(self._passes.answer(requests), context, lambda: None)
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response

    def _free(self, stream: SessionStream) -> None:
        """Free the session of a stream that has ended, which its call cannot wait for: it may be cancelled."""
        task = asyncio.create_task(_free_logged(stream))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def GetSession(
        self, request: api_pb2.SessionName, context: Context
    ) -> api_pb2.SessionState:
        async def show() -> api_pb2.SessionState:
            control = SessionControl(self._service, is_forwarded=is_forwarded(context))
            return await control.show(control.find_key(request.model, request.session_id))

        empty = api_pb2.SessionState
        return await self._answer_or_abort(show, context, empty, request.model)

    async def CloseSession(
        self, request: api_pb2.SessionName, context: Context
    ) -> api_pb2.CloseSessionResponse:
        async def close() -> api_pb2.CloseSessionResponse:
            control = SessionControl(self._service, is_forwarded=is_forwarded(context))
            await control.close(control.find_key(request.model, request.session_id))
            return api_pb2.CloseSessionResponse()

        empty = api_pb2.CloseSessionResponse
        return await self._answer_or_abort(close, context, empty, request.model)

    async def ForkSession(
        self, request: api_pb2.ForkSessionRequest, context: Context
    ) -> api_pb2.SessionState:
        async def fork() -> api_pb2.SessionState:
            control = SessionControl(self._service, is_forwarded=is_forwarded(context))
            key = control.find_key(request.model, request.session_id)
            return await control.fork(key, request.fork)

        empty = api_pb2.SessionState
        return await self._answer_or_abort(fork, context, empty, request.model)

    async def _answer(
        self,
        request: api_pb2.GenerateRequest,
        context: Context,
        check: Callable[[api_pb2.GenerateRequest], None],
    ) -> AsyncIterator[api_pb2.GenerateResponse]:
        async def accept() -> None:
            await context.send_initial_metadata(())  # the call was accepted, and waits

        async def parts() -> AsyncGenerator[api_pb2.GenerateResponse, None]:
            try:
                check(request)
                caller = Caller(is_forwarded(context), accept)
                async with aclosing(stream_answer(self._service, request, caller)) as answer:
                    async for part in answer:
                        yield part
            except ApiError as error:
                raise rename_field(error) from error

        found = parts()
        if not is_forwarded(context):
            found = counted_parts(self._service.metrics, lambda: request.model, found)
        async with aclosing(_stream_or_abort(found, context, lambda: None)) as answer:
            async for part in answer:
                yield part


async def _stream_or_abort(
    answer: AsyncGenerator[Response, None], context: Context, at_end: Callable[[], None]
) -> AsyncGenerator[Response, None]:
    """Yield the responses of a call in both directions, and call `at_end`. Then its error aborts the call."""
    failure: ApiError | None = None
    try:
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response
    except ApiError as error:
        failure = error
    except (asyncio.CancelledError, GeneratorExit, aio.AbortError):
        raise
    except Exception:
        log.exception("internal error in a stream")
        failure = ApiError(Code.INTERNAL, "internal error")
    finally:
        at_end()
    if failure is not None:
        await abort_call(context, failure)


async def _free_logged(stream: SessionStream) -> None:
    try:
        await stream.free()
    except ApiError as error:
        code = error.code.value  # its text may have the session's name
        log.info("session of a stream not freed at its end, model=%s: %s", stream.model, code)
