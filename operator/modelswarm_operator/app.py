"""`modelswarm-operator`: flags in, a running operator, an exit code out.

0 after a graceful stop, 2 with one sentence when it cannot start, 1 when it may no longer act (the lease is lost) or a
part of it failed: Kubernetes starts it again, and nothing depends on how it ended. Standbys wait here for the lease.
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

from modelswarm.process.command_line import run_with_exit_code
from modelswarm.process.early_signals import exit_on_signals
from modelswarm.process.parent_watch import exit_with_parent
from modelswarm.process.run_files import announce, withdraw
from modelswarm_operator.controller.manager import Leading
from modelswarm_operator.kube.access_review import missing_rights
from modelswarm_operator.kube.client import Api, load_configuration
from modelswarm_operator.kube.errors import ApiError
from modelswarm_operator.kube.leader_election import Lease
from modelswarm_operator.observability.logs import set_up_logging
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.observability.probe_server import Probes
from modelswarm_operator.settings import Settings, parse

log = logging.getLogger(__name__)
PROGRAM = "modelswarm-operator"
ASK_SECONDS = 10.0  # between two looks at rights that are missing


def main(arguments: Sequence[str] | None = None) -> int:
    return run_with_exit_code(
        PROGRAM, lambda: _operate(parse(sys.argv[1:] if arguments is None else arguments))
    )


def _operate(settings: Settings) -> int:
    exit_on_signals()  # until the process has its own way to stop
    set_up_logging(settings.json_logs)
    if settings.parent_fd is not None:
        exit_with_parent(settings.parent_fd)
    gc.freeze()  # modules are not garbage: never look at them again
    return asyncio.run(Process(settings).run())


class Process:
    """The parts of a running operator and the order in which they start and stop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = asyncio.Event()
        self._metrics = Metrics()
        self._leading: Leading | None = None
        self._not_ready = "the operator's rights are not checked yet"

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        settings = self._settings
        configuration = await load_configuration(settings.kubeconfig)
        probes = Probes(self._metrics.registry, self._live, self._ready, self._count)
        port = await probes.start(*settings.health)
        if settings.run_file is not None:
            announce(settings.run_file, {"health": port})
        api = Api(settings.kubeconfig, configuration, self._metrics.api_call)
        try:
            return await self._work(api)
        finally:
            if settings.run_file is not None:
                withdraw(settings.run_file)
            await probes.stop()
            await api.close()

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            os._exit(1)  # asked twice: whatever hangs, hang no longer
        log.info("stopping")
        self._stopping.set()

    async def _work(self, api: Api) -> int:
        identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
        settings = self._settings
        lease = Lease(api, settings.lease_namespace, settings.lease_name, identity)
        if not await self._unless_stopped(self._check_rights(api)):
            return 0
        if settings.elect:
            if not await self._unless_stopped(lease.acquire()):
                await lease.release()  # it may have come in this moment
                return 0
            api.fence = lease.check
        return await self._lead(api, lease, identity)

    async def _unless_stopped(self, job: Awaitable[None]) -> bool:
        """Whether it came to its end."""
        working, stopping = asyncio.ensure_future(job), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done() and not self._stopping.is_set()
        finally:
            for task in (working, stopping):
                task.cancel()

    async def _check_rights(self, api: Api) -> None:
        """Waits until everything that is needed is allowed; says what is not, whenever that changes."""
        settings, told = self._settings, ""
        lease_namespace = settings.lease_namespace if settings.elect else ""
        while True:
            try:
                missing = await missing_rights(
                    api, settings.namespaces, lease_namespace, settings.lease_name
                )
            except ApiError as error:
                news = f"the operator's rights cannot be checked: {error}"
                needed = True
            else:
                self._metrics.missing_rights.set(len(missing))
                needed = any(not each.need.optional for each in missing)
                listed = "; ".join(str(each) for each in missing)
                news = f"the operator's account may not: {listed}" if missing else ""
            if news and news != told:
                log.log(logging.ERROR if needed else logging.WARNING, news)
                told = news
            self._not_ready = news if needed else ""
            if not needed:
                return
            await asyncio.sleep(ASK_SECONDS)

    async def _lead(self, api: Api, lease: Lease, identity: str) -> int:
        self._metrics.leader.set(1)
        self._leading = Leading(self._settings, api, self._metrics, identity)
        acting = asyncio.create_task(self._leading.run())
        stopping = asyncio.create_task(self._stopping.wait())
        watched: set[asyncio.Task[object]] = {acting, stopping}
        if self._settings.elect:
            watched.add(asyncio.create_task(lease.keep()))
        done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if stopping not in done:
            self._end_at_once(acting)
        await self._leading.stop()
        for task in watched:
            task.cancel()
        await asyncio.wait(watched, timeout=0.5)
        if self._settings.elect:
            await lease.release()
        log.info("stopped")
        return 0

    def _end_at_once(self, acting: asyncio.Task[None]) -> None:
        """Nothing of this process may write any more, so nothing is tidied up."""
        if acting.done() and (error := acting.exception()) is not None:
            log.error("the operator failed", exc_info=error)
        logging.shutdown()
        os._exit(1)

    def _live(self) -> str:
        return self._leading.stuck() if self._leading is not None else ""

    def _ready(self) -> str:
        if self._not_ready or self._leading is None:
            return self._not_ready
        resync = self._leading.resync
        return resync.problem if resync.forbidden or not resync.synced else ""

    def _count(self) -> None:
        if self._leading is not None:
            self._leading.count()
