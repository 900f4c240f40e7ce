"""The gateway process: its parts, the order in which they start, and the graceful shutdown.

Made by `__main__.py`. All ports are bound before any part serves, so that a port in use leaves nothing half started.
The first signal lets running answers end; the second ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from modelswarm.process.run_files import publish_addresses, remove_run_file
from modelswarm.protocol.identity import peer_id
from modelswarm_gateway.api.asgi_server import AsgiServer, bind_socket
from modelswarm_gateway.api.forwarding import Forwarder
from modelswarm_gateway.api.grpc.server import GrpcServer, admin_api, client_api
from modelswarm_gateway.api.http.app import build_http_app
from modelswarm_gateway.api.metrics_app import build_metrics_app
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.discovery.dialer import ModelSource
from modelswarm_gateway.discovery.file_source import FileSource
from modelswarm_gateway.discovery.readiness import Readiness
from modelswarm_gateway.generation.service import GenerationService, ServiceSettings
from modelswarm_gateway.metrics.collectors import PodCollector
from modelswarm_gateway.metrics.counters import Metrics
from modelswarm_gateway.runtime.browser_page import open_browser_page
from modelswarm_gateway.runtime.node import Node
from modelswarm_gateway.settings import Settings, advertised_targets, dead_seconds

if TYPE_CHECKING:
    from modelswarm_gateway.discovery.kubernetes_source import KubernetesSource

log = logging.getLogger(__name__)
# Time to close API servers and links after the last answer, in seconds.
CLOSE_TIMEOUT = 3.0
# Time between two reports of errors of a periodic job, in seconds: a job that fails each time would log 20 a second.
ERROR_SECONDS = 60.0


class _Server(Protocol):
    """A part with a bound port."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class GatewayApp:
    """The parts of a running gateway and the order in which they start and stop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal. Raise UserError if the gateway cannot start."""
        settings, loop = self._settings, asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        source, cluster = self._make_source(loop.time)
        if cluster is not None:
            await cluster.check_config()
        sockets = bind_socket("--http", settings.http), bind_socket("--metrics", settings.metrics)
        node = self._make_node(source, loop.time)
        metrics = node.recovery_events.observer = Metrics(node, vllm_names=settings.vllm_metrics)
        if cluster is not None:
            metrics.registry.register(PodCollector(cluster))
        service = GenerationService(node, metrics, loop.time, _service_settings(settings))
        forwarder, grpc_server = Forwarder(), GrpcServer(service, client_api(service))
        admin_server = GrpcServer(service, admin_api(service, node.drains))
        grpc_target = grpc_server.bind("--grpc", settings.grpc)
        admin_target = admin_server.bind("--admin", settings.admin)
        http_servers = [
            AsgiServer(
                build_http_app(
                    service,
                    _readiness_check(node, cluster, loop.time),
                    settings.cors_origins,
                    {"grpc": _port(grpc_target), "admin": _port(admin_target)},
                    forwarder,
                    settings.session_headers,
                ),
                sockets[0],
            ),
            AsgiServer(build_metrics_app(metrics.registry), sockets[1]),
        ]
        http_target = _bound(settings.http, http_servers[0].target)
        pages = open_browser_page(settings.ui, http_target, admin_target)
        servers: list[_Server] = [grpc_server, admin_server, *http_servers, *pages]
        for server in servers:
            await server.start()
        node.set_advertised_targets(advertised_targets(settings, http_target, grpc_target))
        tasks = [loop.create_task(job) for job in self._periodic_jobs(node, service, cluster)]
        targets = {
            "http": http_target,
            "grpc": grpc_target,
            "admin": admin_target,
            "metrics": _bound(settings.metrics, http_servers[1].target),
        }
        try:
            if settings.run_file is not None:
                publish_addresses(settings.run_file, {**targets, "peer": node.peer})
            named = ", ".join(f"{n} at {t}" for n, t in targets.items())
            log.info("%s serves %s", node.peer, named)
            await self._stopping.wait()
            await self._shut_down(service, grpc_server, http_servers[0])
        finally:
            if settings.run_file is not None:
                remove_run_file(settings.run_file)
            await _run_all([server.stop() for server in servers])
            for task in tasks:
                task.cancel()
            await _run_all([node.shut_down(), forwarder.close()])

    def _make_source(
        self, clock: Callable[[], float]
    ) -> tuple[ModelSource, KubernetesSource | None]:
        """Return the endpoint source, and the same object as a KubernetesSource; None for a discovery folder."""
        settings = self._settings
        if settings.discovery_dir is not None:
            return FileSource(settings.discovery_dir), None
        from modelswarm_gateway.discovery.kubernetes_source import KubernetesSource

        cluster = KubernetesSource(settings.kubeconfig, settings.namespaces, clock, random.random)
        return cluster, cluster

    def _make_node(self, source: ModelSource, clock: Callable[[], float]) -> Node:
        settings = self._settings
        incarnation = settings.incarnation or time.time_ns()  # differs between replicas
        core = GatewaySettings(
            hold_limit_seconds=settings.hold_limit_seconds,
            suspect_after_seconds=settings.suspect_after_seconds,
            fence_timeout_seconds=settings.fence_timeout_seconds,
            disconnect_after_seconds=dead_seconds(settings.suspect_after_seconds),
            lease_seconds=settings.lease_seconds,
            rebalance_after_seconds=settings.rebalance_after_seconds,
        )
        peer = peer_id(settings.name, incarnation)
        return Node(peer, incarnation, source, core, clock, time.time, settings.replaces)

    def _periodic_jobs(
        self, node: Node, service: GenerationService, cluster: KubernetesSource | None
    ) -> list[Coroutine[Any, Any, None]]:
        jobs = [
            run_every(0.05, node.tick, service.clock),
            run_every(0.2, node.discover_servers, service.clock),
            run_every(1.0, service.named_sessions.evict_expired, service.clock),
            run_every(1.0, service.end_unread, service.clock),
        ]
        if cluster is not None:
            cluster.on_change = node.discover_servers
            jobs.append(cluster.run())
        return jobs

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            os._exit(1)  # second signal: some part hangs
        self._stopping.set()

    async def _shut_down(
        self, service: GenerationService, grpc_server: GrpcServer, http_server: AsgiServer
    ) -> None:
        """Send clients elsewhere until none comes; then refuse requests, await running answers, and abort the rest.

        Load balancers learn late that this process stops: on a busy machine seconds late.
        """
        quiet, drain = self._settings.shutdown_delay_seconds, self._settings.drain_timeout_seconds
        ends = service.clock() + quiet + drain
        service.shutting_down = True
        await grpc_server.stop_advertising()
        if quiet:
            log.info("shutting down: requests are accepted until none arrived for %g s", quiet)
            if not await service.wait_for_no_requests(quiet, until=ends - drain / 2):
                log.warning("requests still arrive although /ready returns 503")
        service.accepting = False
        log.info("refusing new requests; %d answers are running", service.running_count)
        http_server.close_idle_connections()
        left = ends - service.clock()
        refusing = asyncio.create_task(grpc_server.stop(left))
        await service.wait_until_idle(left)
        service.abort_all()
        refusing.cancel()


def _service_settings(settings: Settings) -> ServiceSettings:
    return ServiceSettings(
        max_named_sessions=settings.max_named_sessions,
        idle_seconds=settings.idle_seconds,
        keepalive_seconds=settings.keepalive_seconds,
        tool_call_parser=settings.tool_call_parser,
    )


def _readiness_check(
    node: Node, cluster: KubernetesSource | None, clock: Callable[[], float]
) -> Callable[[], str | None] | None:
    if cluster is None:
        return None
    return Readiness(cluster.unready_reason, node.is_settled, clock).unready_reason


async def run_every(seconds: float, job: Callable[[], None], clock: Callable[[], float]) -> None:
    """Run a job periodically. A failure is logged and the job runs again: it must not end streams."""
    quiet_until = -math.inf
    while True:
        try:
            job()
        except Exception:
            if clock() >= quiet_until:
                quiet_until = clock() + ERROR_SECONDS
                log.exception("internal error in a periodic job; quiet for %g s", ERROR_SECONDS)
        await asyncio.sleep(seconds)


async def _run_all(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all jobs at once, and cancel those that do not end within CLOSE_TIMEOUT."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT)
    for task in tasks:
        if not task.done():
            task.cancel()
        elif (error := task.exception()) is not None:
            log.error("shutdown step failed", exc_info=error)


def _bound(asked: str, target: str) -> str:
    """Return the asked host with the bound port: a socket of all addresses has the host `::`, whatever was asked."""
    return f"{asked.rpartition(':')[0]}:{_port(target)}"


def _port(target: str) -> int:
    return int(target.rpartition(":")[2])
