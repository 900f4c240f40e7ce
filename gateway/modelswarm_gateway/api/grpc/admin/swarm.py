"""The Swarm service of api.proto: snapshots of the swarm, route explanations and drains.

Added to the server by `server.py`. Each call is answered by a module of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.api.grpc.admin.drain import run_drain
from modelswarm_gateway.api.grpc.admin.route_explanation import explain_routes
from modelswarm_gateway.api.grpc.admin.swarm_state import build_snapshot, check_model
from modelswarm_gateway.api.grpc.status import Context, abort_call
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.runtime.drains import Drains

# Shortest time between two snapshots of one Watch call, in seconds.
MIN_SNAPSHOT_SECONDS = 0.5
# Watch calls that run at a time.
MAX_WATCHERS = 64
# Drain calls that run at a time, without undos. A drain continues when its call ends.
MAX_DRAINS = 16
# Seconds after which a refused call may be repeated.
RETRY_SECONDS = 1.0


class Swarm(api_pb2_grpc.SwarmServicer):
    def __init__(self, service: GenerationService, drains: Drains) -> None:
        self._service, self._drains = service, drains
        self._watchers = self._draining = 0

    async def List(self, request: api_pb2.ListRequest, context: Context) -> api_pb2.Snapshot:
        await self._check_model(request.model, context)
        return build_snapshot(self._service.backend, request.model)

    async def Watch(
        self, request: api_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[api_pb2.Snapshot]:
        await self._check_model(request.model, context)
        if self._watchers >= MAX_WATCHERS:
            await abort_call(context, _too_many(MAX_WATCHERS, "Watch"))
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
    ) -> AsyncIterator[api_pb2.DrainProgress]:
        if self._draining >= MAX_DRAINS and not request.undo:
            await abort_call(context, _too_many(MAX_DRAINS, "Drain"))
        self._draining += 1
        try:
            async for state in run_drain(self._drains, request, lambda: self._service.accepting):
                yield state
        except ApiError as error:
            await abort_call(context, error)
        finally:
            self._draining -= 1

    async def _check_model(self, model: str, context: Context) -> None:
        """End the call unless `model` is known; a model that leaves later leaves empty snapshots."""
        try:
            check_model(self._service.backend, model)
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


def _too_many(limit: int, method: str) -> ApiError:
    detail = f"{limit} {method} calls are running already; try again later"
    return ApiError(Code.NO_CAPACITY, detail, retry_after=RETRY_SECONDS)
