"""The gRPC door: modelswarm.v1 (api.proto), grpc.health.v1 and reflection.

`main.py` starts it. Failures become status codes by the table in `errors.py`; the same codes that HTTP gives travel
in the trailing metadata.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from modelswarm.errors import UserError
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.api.asgi_server import bind_socket
from modelswarm_gateway.api.failover import StreamFailover
from modelswarm_gateway.api.forwarding import FORWARDED_HEADER, PeerGone
from modelswarm_gateway.api.grpc.drain import run_drain
from modelswarm_gateway.api.grpc.forwarding import forward_stream, is_alive_at
from modelswarm_gateway.api.grpc.requests import parse_generate_request
from modelswarm_gateway.api.grpc.route_explanation import explain_routes
from modelswarm_gateway.api.grpc.swarm_state import build_snapshot
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.generation import Generation, OutputChunk
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_locator import OwnedElsewhere
from modelswarm_gateway.runtime.drains import Drains

log = logging.getLogger(__name__)

PING_INTERVAL = 1.0  # seconds: clients may ping so often, also while nothing is said
PING_TIMEOUT = 20.0  # seconds that a client has to answer ours
MIN_SNAPSHOT_SECONDS = 0.5  # seconds between snapshots
MAX_WATCHERS = 64
MAX_MESSAGE_BYTES = 16 << 20
GRACE_SECONDS = 1.0
Context: TypeAlias = "aio.ServicerContext[Any, Any]"
SERVICES = ("modelswarm.v1.Inference", "modelswarm.v1.Swarm")


class GrpcServer:
    def __init__(self, service: GenerationService, drains: Drains) -> None:
        self._service, self._drains = service, drains
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = aio.server(options=_options(service.settings.keepalive_seconds))
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, field: str, target: str) -> str:
        """The bound target. Raises UserError when it cannot be had."""
        api_pb2_grpc.add_InferenceServicer_to_server(Inference(self._service), self._server)
        api_pb2_grpc.add_SwarmServicer_to_server(Swarm(self._service, self._drains), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        bind_socket(field, target).close()  # says what is wrong with it; gRPC itself prints pages
        try:
            port = self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise UserError(
                field, f"cannot listen on {target}: allowed: a free port, or 0"
            ) from error
        await self._server.start()
        self._watcher = asyncio.create_task(self._update_health())
        return f"{target.rpartition(':')[0]}:{port}"

    async def stop_advertising(self) -> None:
        """Says that clients should go elsewhere; those that still come are served."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Takes nothing new (GOAWAY), and ends what still runs after `grace` seconds."""
        await self.stop_advertising()
        await self._server.stop(grace)

    async def _update_health(self) -> None:
        """The whole process is healthy while it runs; the services are when a model can answer."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING)
        while True:
            good = self._service.accepting and any(
                c.ready for c in self._service.backend.model_cards()
            )
            for name in SERVICES:
                await self._health.set(name, status.SERVING if good else status.NOT_SERVING)
            await asyncio.sleep(MIN_SNAPSHOT_SECONDS)


def _options(keepalive: float) -> list[tuple[str, int]]:
    """A session that is held says nothing for minutes: pings both ways keep its connection."""
    return [
        ("grpc.so_reuseport", 0),  # a port in use must be an error
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(1000 * keepalive)),
        ("grpc.keepalive_timeout_ms", round(1000 * PING_TIMEOUT)),
        ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * PING_INTERVAL)),
        ("grpc.http2.max_ping_strikes", 0),  # a client that pings more often is not sent away
    ]


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
            log.exception("a request failed by a fault of ours")
            failure = ApiError(Code.INTERNAL, "internal error")
        self._service.metrics.count_request(request.model, failure.code if failure else None)
        if failure is not None:
            await abort_call(context, failure)

    async def _answer_with_failover(
        self, request: api_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[api_pb2.GenerateResponse]:
        """Here or elsewhere: when whoever answers is gone, the answer goes on behind what the client has of it."""
        forwarded = any(name == FORWARDED_HEADER for name, _ in context.invocation_metadata() or ())
        course = StreamFailover(self._service.clock)
        last: api_pb2.GenerateResponse | None = None
        while True:
            asked = replace(parse_generate_request(request), forwarded=forwarded)
            try:
                async for part in self._answer_once(request, asked, course, context):
                    yield part
                    last = part if part.token_ids else last
                    course.on_delivered()
                return
            except (PeerGone, ApiError) as error:
                await course.before_retry(error)
            if last is not None:
                request = _resume_request(last, request)

    async def _answer_once(
        self,
        request: api_pb2.GenerateRequest,
        asked: GenerationRequest,
        course: StreamFailover,
        context: Context,
    ) -> AsyncIterator[api_pb2.GenerateResponse]:
        try:
            generation = await self._service.start_generation(asked)
        except OwnedElsewhere as elsewhere:
            lives = partial(is_alive_at, self._service, asked, elsewhere.grpc)
            async for part in forward_stream(elsewhere.grpc, request, lives):
                yield part
            return
        try:
            name = f"gen-{secrets.token_hex(12)}"
            finish = None
            while finish is None:
                piece = await generation.next_chunk(self._service.keepalive_seconds(asked.model))
                if piece is None and not course.has_begun:
                    course.has_begun = True
                    await context.send_initial_metadata(())  # it has been taken, and waits
                if piece is not None:
                    finish = piece.finish
                    yield _response_part(name, piece, generation)
                    generation.acknowledge(piece)
        except ApiError as error:
            if error.code is Code.SESSION_ELSEWHERE and not asked.forwarded:
                raise PeerGone from error  # another gateway has just taken it
            raise
        finally:
            generation.close()


def _resume_request(
    last: api_pb2.GenerateResponse, request: api_pb2.GenerateRequest
) -> api_pb2.GenerateRequest:
    """The same request, for what follows that part."""
    made = api_pb2.GenerateRequest()
    made.CopyFrom(request)
    made.resume_after = last.position + len(last.token_ids) - 1
    made.resume_mark = last.mark
    return made


def _response_part(
    name: str, piece: OutputChunk, generation: Generation
) -> api_pb2.GenerateResponse:
    part = api_pb2.GenerateResponse(
        id=name,
        text=piece.text,
        token_ids=piece.tokens,
        position=piece.position,
        mark=piece.mark,
    )
    if piece.finish is not None:
        prompt, completion = len(generation.prompt), generation.completion_tokens
        part.finish_reason = piece.finish
        part.usage.prompt_tokens = prompt
        part.usage.completion_tokens = completion
        part.usage.total_tokens = prompt + completion
    return part


async def abort_call(context: Context, error: ApiError) -> None:
    """Ends the call with the status, and the details in the trailing metadata."""
    trailing = [("error-code", error.code.value)]
    if error.param is not None:
        trailing.append(("error-param", error.param))
    if error.retry_after is not None:
        trailing.append(("retry-after", f"{error.retry_after:.3f}"))
    await context.abort(error.mapping.grpc, error.message, tuple(trailing))


class Swarm(api_pb2_grpc.SwarmServicer):
    def __init__(self, service: GenerationService, drains: Drains) -> None:
        self._service, self._drains = service, drains
        self._watchers = 0

    async def List(self, request: api_pb2.ListRequest, context: Context) -> api_pb2.Snapshot:
        return build_snapshot(self._service.backend, request.model)

    async def Watch(
        self, request: api_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[api_pb2.Snapshot]:
        if self._watchers >= MAX_WATCHERS:
            detail = f"{MAX_WATCHERS} calls of Watch run already"
            await abort_call(
                context, ApiError(Code.NO_CAPACITY, detail, retry_after=MIN_SNAPSHOT_SECONDS)
            )
        self._watchers += 1
        try:
            async for now in self._snapshots(request):
                yield now
        finally:
            self._watchers -= 1

    async def Routes(self, request: api_pb2.RoutesRequest, context: Context) -> api_pb2.RoutesReply:
        try:
            return explain_routes(self._service.backend, request.model)
        except ApiError as error:
            await abort_call(context, error)
            return api_pb2.RoutesReply()  # the call was aborted

    async def Drain(
        self, request: api_pb2.DrainRequest, context: Context
    ) -> AsyncIterator[api_pb2.DrainState]:
        try:
            async for state in run_drain(self._drains, request, lambda: self._service.accepting):
                yield state
        except ApiError as error:
            await abort_call(context, error)

    async def _snapshots(self, request: api_pb2.WatchRequest) -> AsyncIterator[api_pb2.Snapshot]:
        interval = max(MIN_SNAPSHOT_SECONDS, request.min_interval_seconds)
        last: api_pb2.Snapshot | None = None
        while self._service.accepting:
            now = build_snapshot(self._service.backend, request.model)
            if now != last:
                yield now
                last = now
            await asyncio.sleep(interval)
