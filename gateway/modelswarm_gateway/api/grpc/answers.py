"""Answers one GenerateRequest as a stream of parts: here or at the gateway that owns the session (R20, takeover).

Used by the Inference service. When the answering gateway is gone, the answer goes on behind what the client has.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.failover import StreamFailover
from modelswarm_gateway.api.forwarding import PeerGone
from modelswarm_gateway.api.grpc.forwarding import forward_stream, is_alive_at
from modelswarm_gateway.api.grpc.requests import count_answers, parse_generate_request
from modelswarm_gateway.api.grpc.responses import add_prompt, response_part, rows_end, usage_of
from modelswarm_gateway.api.merged_chunks import merge_chunks
from modelswarm_gateway.errors import ApiError, Code, gateway_stopping
from modelswarm_gateway.generation.continuation import append_unknown
from modelswarm_gateway.generation.generation import Generation
from modelswarm_gateway.generation.output.turn_output import OutputChunk
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_locator import OwnedElsewhere

Parts = AsyncGenerator[api_pb2.GenerateResponse, None]


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of one answer."""

    is_gateway: bool  # which takes this one for the session's owner
    on_accepted: Callable[[], Awaitable[None]]  # called if the answer waits before its first part


async def stream_answer(
    service: GenerationService, request: api_pb2.GenerateRequest, caller: Caller
) -> Parts:
    """Yield the parts of the answer. Raise ApiError. Changes of `request` are for further tries."""
    failover = StreamFailover(service.clock)
    last: api_pb2.GenerateResponse | None = None
    while True:
        parsed = replace(parse_generate_request(request), forwarded=caller.is_gateway)
        try:
            answer = _answer_once(service, request, parsed, failover, caller)
            async with aclosing(answer) as parts:
                async for part in parts:
                    yield part
                    last = part if part.token_ids else last
                    if part.HasField("rows_position"):
                        request.rows_after = rows_end(part)
                    failover.on_delivered()
            return
        except (PeerGone, ApiError) as error:
            if isinstance(error, PeerGone) and last is None and _may_append_twice(request):
                raise append_unknown() from error
            await failover.before_retry(error)
        if last is not None:
            request = _resume_request(last, request)


async def _answer_once(
    service: GenerationService,
    request: api_pb2.GenerateRequest,
    parsed: GenerationRequest,
    failover: StreamFailover,
    caller: Caller,
) -> Parts:
    try:
        generation = await service.start_generation(parsed)
    except OwnedElsewhere as elsewhere:
        async with aclosing(_forward(service, request, parsed, elsewhere.grpc)) as parts:
            async for part in parts:
                yield part
        return
    if generation.position is not None:  # of further tries, so that none appends the input twice
        request.session_position = generation.position
    generations = [generation]
    try:
        async with aclosing(_generate(service, request, parsed.model, generations)) as parts_here:
            async for here in parts_here:
                if here is not None:
                    yield here
                elif not failover.has_begun:
                    failover.has_begun = True
                    await caller.on_accepted()
    except ApiError as error:
        if error.code is Code.SESSION_ELSEWHERE and not caller.is_gateway:
            raise PeerGone from error  # another gateway has just taken the session over
        raise
    finally:
        for each in generations:
            each.close()


async def _forward(
    service: GenerationService,
    request: api_pb2.GenerateRequest,
    parsed: GenerationRequest,
    target: str,
) -> Parts:
    """Yield the parts of the answer of the gateway at `target`. Raise ApiError if this one stops first."""
    with service.forwarding() as stopping:

        async def is_alive() -> bool:
            if stopping.done():
                raise gateway_stopping()
            return await is_alive_at(service, parsed, target)

        async with aclosing(forward_stream(target, request, is_alive)) as parts:
            async for part in parts:
                yield part
                if stopping.done():
                    raise gateway_stopping()


async def _generate(
    service: GenerationService,
    request: api_pb2.GenerateRequest,
    model: str,
    generations: list[Generation],
) -> AsyncGenerator[api_pb2.GenerateResponse | None, None]:
    """Yield the parts of all answers, None while there is nothing new. Adds the other answers to `generations`."""
    name = f"gen-{secrets.token_hex(12)}"
    open_answers = count_answers(request)
    if open_answers > 1:
        service.start_choices(generations, open_answers)
    begins = not request.HasField("resume_after")
    chunks = _read_chunks(generations, service.keepalive_seconds(model))
    async with aclosing(chunks) as each_chunk:
        async for found in each_chunk:
            if found is None:
                yield None
                continue
            index, chunk = found
            generation = generations[index]
            part = await response_part(name, chunk, generation, index)
            if begins:
                await add_prompt(part, generation, request)
            begins = False
            open_answers -= chunk.finish is not None
            if not open_answers:
                part.usage.CopyFrom(usage_of(generations))
            yield part
            generation.acknowledge(chunk)


async def _read_chunks(
    generations: list[Generation], keepalive: float
) -> AsyncGenerator[tuple[int, OutputChunk] | None, None]:
    if len(generations) > 1:
        async with aclosing(merge_chunks(generations, keepalive)) as chunks:
            async for each in chunks:
                yield each
        return
    finish = None
    while finish is None:
        chunk = await generations[0].next_chunk(keepalive)
        finish = None if chunk is None else chunk.finish
        yield None if chunk is None else (0, chunk)


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
