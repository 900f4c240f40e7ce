"""The Inference service of api.proto: one generation as one response or as a stream.

Added to the server by `server.py`. A call whose session another gateway owns is forwarded there. Knows neither sessions
nor servers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.api.failover import StreamFailover
from modelswarm_gateway.api.forwarding import FORWARDED_HEADER, PeerGone
from modelswarm_gateway.api.grpc.forwarding import forward_stream, is_alive_at
from modelswarm_gateway.api.grpc.requests import parse_generate_request
from modelswarm_gateway.api.grpc.status import Context, abort_call
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.continuation import append_unknown
from modelswarm_gateway.generation.generation import Generation, OutputChunk
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_locator import OwnedElsewhere

log = logging.getLogger(__name__)


class Inference(api_pb2_grpc.InferenceServicer):
    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def Generate(
        self, request: api_pb2.GenerateRequest, context: Context
    ) -> api_pb2.GenerateResponse:
        parts = [part async for part in self._answer(request, context)]
        if not parts:
            return api_pb2.GenerateResponse()  # the call was aborted
        first, last = parts[0], parts[-1]
        return api_pb2.GenerateResponse(
            id=first.id,
            text="".join(part.text for part in parts),
            token_ids=[token for part in parts for token in part.token_ids],
            position=first.position,
            finish_reason=last.finish_reason,
            usage=last.usage,
            mark=last.mark,
        )

    async def GenerateStream(
        self, request: api_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[api_pb2.GenerateResponse]:
        async for part in self._answer(request, context):
            yield part

    async def _answer(
        self, request: api_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[api_pb2.GenerateResponse]:
        failure: ApiError | None = None
        try:
            async for part in self._answer_with_failover(request, context):
                yield part
        except ApiError as error:
            failure = error
        except (asyncio.CancelledError, GeneratorExit):
            self._service.metrics.count_request(request.model, Code.CANCELLED)
            raise
        except Exception:
            log.exception("internal error while answering a request")
            failure = ApiError(Code.INTERNAL, "internal error")
        self._service.metrics.count_request(request.model, failure.code if failure else None)
        if failure is not None:
            await abort_call(context, failure)

    async def _answer_with_failover(
        self, request: api_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[api_pb2.GenerateResponse]:
        """Answer here or by another gateway. When the answering gateway is gone, go on behind what the client has."""
        forwarded = any(name == FORWARDED_HEADER for name, _ in context.invocation_metadata() or ())
        failover = StreamFailover(self._service.clock)
        last: api_pb2.GenerateResponse | None = None
        while True:
            generation_request = replace(parse_generate_request(request), forwarded=forwarded)
            try:
                async for part in self._answer_once(request, generation_request, failover, context):
                    yield part
                    last = part if part.token_ids else last
                    failover.on_delivered()
                return
            except (PeerGone, ApiError) as error:
                if isinstance(error, PeerGone) and last is None and _may_append_twice(request):
                    raise append_unknown() from error
                await failover.before_retry(error)
            if last is not None:
                request = _resume_request(last, request)

    async def _answer_once(
        self,
        request: api_pb2.GenerateRequest,
        generation_request: GenerationRequest,
        failover: StreamFailover,
        context: Context,
    ) -> AsyncIterator[api_pb2.GenerateResponse]:
        try:
            generation = await self._service.start_generation(generation_request)
        except OwnedElsewhere as elsewhere:
            is_alive = partial(is_alive_at, self._service, generation_request, elsewhere.grpc)
            async for part in forward_stream(elsewhere.grpc, request, is_alive):
                yield part
            return
        if (
            generation.position is not None
        ):  # of further tries, so that none appends the input twice
            request.session_position = generation.position
        try:
            name = f"gen-{secrets.token_hex(12)}"
            finish = None
            while finish is None:
                chunk = await generation.next_chunk(
                    self._service.keepalive_seconds(generation_request.model)
                )
                if chunk is None and not failover.has_begun:
                    failover.has_begun = True
                    await context.send_initial_metadata(())  # the call was accepted, and waits
                if chunk is not None:
                    finish = chunk.finish
                    yield _response_part(name, chunk, generation)
                    generation.acknowledge(chunk)
        except ApiError as error:
            if error.code is Code.SESSION_ELSEWHERE and not generation_request.forwarded:
                raise PeerGone from error  # another gateway has just taken the session over
            raise
        finally:
            generation.close()


def _may_append_twice(request: api_pb2.GenerateRequest) -> bool:
    return request.append and not request.HasField("session_position")


def _resume_request(
    last: api_pb2.GenerateResponse, request: api_pb2.GenerateRequest
) -> api_pb2.GenerateRequest:
    """Return the same request, for what follows the part `last`."""
    made = api_pb2.GenerateRequest()
    made.CopyFrom(request)
    made.resume_after = last.position + len(last.token_ids) - 1
    made.resume_mark = last.mark
    return made


def _response_part(
    name: str, chunk: OutputChunk, generation: Generation
) -> api_pb2.GenerateResponse:
    part = api_pb2.GenerateResponse(
        id=name,
        text=chunk.text,
        token_ids=chunk.tokens,
        position=chunk.position,
        mark=chunk.mark,
    )
    if chunk.finish is not None:
        prompt, completion = len(generation.prompt), generation.completion_tokens
        part.finish_reason = chunk.finish
        part.usage.prompt_tokens = prompt
        part.usage.completion_tokens = completion
        part.usage.total_tokens = prompt + completion
    return part
