"""The gRPC servers: one for clients (Inference of api.proto), one for admins (Swarm), each with health and reflection.

`app.py` starts both. Swarm tells of all sessions and servers, so it is not on the port of the clients.
Failures become status codes by the table in `errors.py`; the codes that HTTP gives travel in the
trailing metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from modelswarm.errors import UserError
from modelswarm.protocol.wire import api_pb2_grpc
from modelswarm_gateway.api.asgi_server import bind_socket
from modelswarm_gateway.api.grpc.admin.swarm import Swarm
from modelswarm_gateway.api.grpc.inference import Inference
from modelswarm_gateway.api.grpc.interceptor.malformed_requests import MalformedRequestInterceptor
from modelswarm_gateway.api.grpc.reflection import add_reflection
from modelswarm_gateway.errors import Code, status_of
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.metrics.counters import OTHER_MODEL
from modelswarm_gateway.runtime.drains import Drains
from modelswarm_gateway.runtime.file_limit import connection_limit

# Shortest time between two pings of a client, also without a call, in seconds: half of what docs/api.md allows.
PING_INTERVAL = 0.5
# Pings that may come earlier; after the next one the connection is closed.
MAX_PING_STRIKES = 2
# Calls that one connection may have at a time; further ones wait at the client.
MAX_STREAMS = 128
# Calls that a port has at a time; further ones get RESOURCE_EXHAUSTED.
MAX_CALLS = 4096
# Seconds that a client has to answer a ping.
PING_TIMEOUT = 20.0
# Seconds after which a connection without a call is closed; clients open another one when they need it.
IDLE_SECONDS = 300.0
# Seconds between updates of the health service.
HEALTH_SECONDS = 0.5
# Largest request message.
MAX_MESSAGE_BYTES = 16 << 20
# Seconds that running calls get when the server stops at once.
GRACE_SECONDS = 1.0
INFERENCE = "modelswarm.v1.Inference"
SWARM = "modelswarm.v1.Swarm"
# Methods whose calls are not counted, as GET is not over HTTP.
UNCOUNTED = (f"/{INFERENCE}/ListModels",)


@dataclass(frozen=True, slots=True)
class GrpcApi:
    """The service of one port, beside health and reflection."""

    name: str
    add_to: Callable[[aio.Server], None]


def client_api(service: GenerationService) -> GrpcApi:
    """Return the API of the clients."""
    servicer = Inference(service)
    return GrpcApi(
        INFERENCE, lambda server: api_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    )


def admin_api(service: GenerationService, drains: Drains) -> GrpcApi:
    """Return the API that shows all sessions and servers, and drains servers."""
    servicer = Swarm(service, drains)
    return GrpcApi(SWARM, lambda server: api_pb2_grpc.add_SwarmServicer_to_server(servicer, server))


class GrpcServer:
    def __init__(self, service: GenerationService, api: GrpcApi) -> None:
        self._service, self._api = service, api
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = aio.server(
            interceptors=(MalformedRequestInterceptor(self._count_refused),),
            options=_options(service.settings.keepalive_seconds),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        self._watcher: asyncio.Task[None] | None = None

    def bind(self, field: str, target: str) -> str:
        """Bind the port and return the bound target. Raise UserError if the port cannot be bound."""
        self._api.add_to(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        add_reflection((self._api.name, health.SERVICE_NAME), self._server)
        bind_socket(field, target).close()  # raises one clear sentence; gRPC itself prints pages
        try:
            port = self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise UserError(
                field, f"cannot listen on {target}: allowed: a free port, or 0"
            ) from error
        return f"{target.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        """Serve on the bound port."""
        await self._server.start()
        self._watcher = asyncio.create_task(self._update_health())

    async def stop_advertising(self) -> None:
        """Report NOT_SERVING, so that clients go elsewhere; requests that still arrive are served."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Refuse new calls (GOAWAY), and end the calls that still run after `grace` seconds."""
        await self.stop_advertising()
        await self._server.stop(grace)

    def _count_refused(self, method: str, code: Code) -> None:
        """Count a request that no method got, as HTTP counts a body that is no JSON."""
        if method.startswith(f"/{INFERENCE}/") and method not in UNCOUNTED:
            self._service.metrics.count_request(OTHER_MODEL, status_of(code))

    async def _update_health(self) -> None:
        """Keep the health service up to date: the process serves while it runs, a service while a model is ready."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING)
        while True:
            good = self._service.accepting and any(
                c.ready for c in self._service.backend.model_cards()
            )
            await self._health.set(self._api.name, status.SERVING if good else status.NOT_SERVING)
            await asyncio.sleep(HEALTH_SECONDS)


def _options(keepalive: float) -> list[tuple[str, int]]:
    """Return gRPC's channel options. A held session sends nothing for minutes: pings both ways keep its connection."""
    return [
        ("grpc.so_reuseport", 0),  # a port in use must be an error
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(1000 * keepalive)),
        ("grpc.keepalive_timeout_ms", round(1000 * PING_TIMEOUT)),
        ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * PING_INTERVAL)),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", connection_limit()),
        ("grpc.max_connection_idle_ms", round(1000 * IDLE_SECONDS)),
    ]
