"""`modelswarm-operator`: flags in, a running operator, an exit code out.

Exit codes: 0 after a graceful stop; 2 with one sentence when it cannot start. 1 means that it may no longer act (the
lease is lost) or that a part failed. Kubernetes starts it again, and nothing depends on how it ended. Standbys wait
for the lease.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path

from modelswarm.errors import UserError
from modelswarm.kube.client import KubeClient
from modelswarm.kube.errors import KubeError, UnreachableError
from modelswarm.process.command_line import run_with_exit_code
from modelswarm.process.early_signals import exit_on_signals
from modelswarm.process.parent_watch import exit_with_parent
from modelswarm.process.run_files import publish_addresses, remove_run_file
from modelswarm_operator.controller.manager import Manager
from modelswarm_operator.kube.access_review import find_missing_permissions
from modelswarm_operator.kube.leader_election import Lease
from modelswarm_operator.observability.logs import set_up_logging
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.observability.probe_server import ProbeServer
from modelswarm_operator.settings import Settings, parse_settings

log = logging.getLogger(__name__)
PROGRAM = "modelswarm-operator"
MAX_CONNECTIONS = 32  # to the API server; the watches have their own
PERMISSION_CHECK_SECONDS = 10.0  # between two checks while a permission is missing


def main(arguments: Sequence[str] | None = None) -> int:
    return run_with_exit_code(
        PROGRAM, lambda: _run_app(parse_settings(sys.argv[1:] if arguments is None else arguments))
    )


def _run_app(settings: Settings) -> int:
    exit_on_signals()  # until the signal handlers of the event loop are set
    set_up_logging(settings.json_logs)
    if settings.parent_fd is not None:
        exit_with_parent(settings.parent_fd)
    gc.freeze()  # modules are never garbage: exclude them from every collection
    return asyncio.run(OperatorApp(settings).run())


async def _load_credentials(client: KubeClient, kubeconfig: Path | None) -> None:
    try:
        await client.connect()
    except UnreachableError as error:
        where = "in-cluster" if kubeconfig is None else str(kubeconfig)
        raise UserError("--kubeconfig", f"{where} cannot be used: {error}") from None


class OperatorApp:
    """The parts of a running operator and the order in which they start and stop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = asyncio.Event()
        self._metrics = Metrics()
        self._manager: Manager | None = None
        self._permission_problem = "the operator's permissions are not checked yet"

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        settings = self._settings
        client = KubeClient(
            settings.kubeconfig,
            user_agent=PROGRAM,
            max_connections=MAX_CONNECTIONS,
            record_call=self._metrics.record_api_call,
        )
        try:
            await _load_credentials(client, settings.kubeconfig)
            return await self._run_with_probes(client)
        finally:
            await client.close()

    async def _run_with_probes(self, client: KubeClient) -> int:
        settings = self._settings
        probes = ProbeServer(
            self._metrics.registry, self._live_problem, self._ready_problem, self._update_metrics
        )
        port = await probes.start(*settings.metrics)
        if settings.run_file is not None:
            publish_addresses(settings.run_file, {"health": port})
        try:
            return await self._run_operator(client)
        finally:
            if settings.run_file is not None:
                remove_run_file(settings.run_file)
            await probes.stop()

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            os._exit(1)  # a second signal: end even if a part hangs
        log.info("stopping")
        self._stopping.set()

    async def _run_operator(self, client: KubeClient) -> int:
        identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
        settings = self._settings
        lease = Lease(client, settings.lease_namespace, settings.lease_name, identity)
        if not await self._run_unless_stopped(self._await_permissions(client)):
            return 0
        if settings.elect:
            if not await self._run_unless_stopped(lease.acquire()):
                await lease.release()  # it may have been acquired in this moment
                return 0
            client.fence = lease.seconds_to_write
        return await self._run_as_leader(client, lease, identity)

    async def _run_unless_stopped(self, job: Awaitable[None]) -> bool:
        """Run the job; return False if the process was stopped before its end."""
        working, stopping = asyncio.ensure_future(job), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done() and not self._stopping.is_set()
        finally:
            for task in (working, stopping):
                task.cancel()

    async def _await_permissions(self, client: KubeClient) -> None:
        """Wait until every required permission is granted; log the missing ones whenever they change."""
        settings, last_message = self._settings, ""
        lease_namespace = settings.lease_namespace if settings.elect else ""
        while True:
            try:
                missing = await find_missing_permissions(
                    client, settings.namespaces, lease_namespace, settings.lease_name
                )
            except KubeError as error:
                message = f"the operator's permissions cannot be checked: {error}"
                needed = True
            else:
                required = sum(not each.permission.optional for each in missing)
                self._metrics.missing_permissions.set(required)
                needed = required > 0
                listed = "; ".join(str(each) for each in missing)
                message = f"the operator's account may not: {listed}" if missing else ""
            if message and message != last_message:
                log.log(logging.ERROR if needed else logging.WARNING, message)
                last_message = message
            self._permission_problem = message if needed else ""
            if not needed:
                return
            await asyncio.sleep(PERMISSION_CHECK_SECONDS)

    async def _run_as_leader(self, client: KubeClient, lease: Lease, identity: str) -> int:
        self._metrics.leader.set(1)
        self._manager = Manager(self._settings, client, self._metrics, identity)
        acting = asyncio.create_task(self._manager.run())
        stopping = asyncio.create_task(self._stopping.wait())
        watched: set[asyncio.Task[object]] = {acting, stopping}
        if self._settings.elect:
            watched.add(asyncio.create_task(lease.renew_until_lost()))
        done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if stopping not in done:
            self._exit_at_once(acting)
        await self._manager.stop()
        for task in watched:
            task.cancel()
        await asyncio.wait(watched, timeout=0.5)
        if self._settings.elect:
            await lease.release()
        log.info("stopped")
        return 0

    def _exit_at_once(self, acting: asyncio.Task[None]) -> None:
        """End without cleaning up: no part of this process may write any more."""
        if acting.done() and (error := acting.exception()) is not None:
            log.error("the operator failed", exc_info=error)
        logging.shutdown()
        os._exit(1)

    def _live_problem(self) -> str:
        return self._manager.stuck_reason() if self._manager is not None else ""

    def _ready_problem(self) -> str:
        if self._permission_problem or self._manager is None:
            return self._permission_problem
        resync = self._manager.resync
        return resync.problem if resync.is_forbidden or not resync.is_synced else ""

    def _update_metrics(self) -> None:
        if self._manager is not None:
            self._manager.update_metrics()
