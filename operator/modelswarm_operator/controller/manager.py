"""The work of the leading process: lists, watches and turns, side by side until it is stopped or must end.

Made and run by `app`, once per process. Knows the order of its parts: no turn and no watch before the first complete
list. Whenever the watches had to start again, it lists at once. Knows no rules about swarms.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time

from modelswarm.kube.client import KubeClient
from modelswarm.kube.errors import KubeError
from modelswarm_operator.controller.executor import Executor
from modelswarm_operator.controller.start_progress import StartProgressReader
from modelswarm_operator.controller.worker import TURN_SECONDS, Workers
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.informer.resync import Resync
from modelswarm_operator.informer.watch import Watch
from modelswarm_operator.kube.events import EventRecorder
from modelswarm_operator.kube.leader_election import LeaseLostError
from modelswarm_operator.kube.resources import NODE, WATCHED, Kind
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.reconcile.reconciler import reconcile
from modelswarm_operator.reconcile.state.actions import Decision
from modelswarm_operator.reconcile.state.observed import Json, Observed
from modelswarm_operator.settings import Settings

log = logging.getLogger(__name__)
STOP_SECONDS = 3.0  # for running turns to end
RESYNC_SPREAD = 0.1  # share of the resync interval over which turns are spread after a list
RESYNCS_PER_FULL_ROUND = 5  # every so many lists all swarms take a turn, not only the changed ones
MAX_PAUSE_SECONDS = (
    15.0  # seconds between two attempts of a failing list, or two starts of the watches
)


class Manager:
    def __init__(
        self, settings: Settings, client: KubeClient, metrics: Metrics, identity: str
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self.cache = Cache()
        self.resync = Resync(client, self.cache, metrics, settings.namespaces)
        executor = Executor(
            client, self.cache, EventRecorder(client, identity), metrics, self._enqueue
        )
        self.workers = Workers(self.cache, executor, self.resync, self._decide, metrics)
        self._start_progress = StartProgressReader(self.cache, self._enqueue)
        self._resync_requested = asyncio.Event()
        self._resync_done = asyncio.Event()
        self._workers_stopped = asyncio.Event()
        self._workers_stopped.set()

    def _enqueue(self, uids: set[str]) -> None:
        self.workers.enqueue(uids)

    def _decide(self, observed: Observed, now: float) -> Decision:
        return reconcile(observed, self._settings.policy, now)

    async def run(self) -> None:
        """Run until cancelled. Raises LeaseLostError, or the error that ended a part."""
        await self._resync_with_retries()
        try:
            async with asyncio.TaskGroup() as group:
                self.workers.enqueue(self.cache.uids())
                group.create_task(self._run_workers())
                group.create_task(self._watch_forever())
                group.create_task(self._resync_periodically())
                group.create_task(self._start_progress.run())
        except* LeaseLostError:
            raise LeaseLostError("a write was stopped: the lease is lost") from None

    async def _run_workers(self) -> None:
        self._workers_stopped.clear()
        try:
            await self.workers.run()
        finally:
            self._workers_stopped.set()

    async def stop(self) -> None:
        """Start nothing new and wait up to STOP_SECONDS for running turns. Cancel `run` after this."""
        self.workers.stop()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._workers_stopped.wait()
        except TimeoutError:
            log.warning("a turn did not end in %.0f s; the next leader completes it", STOP_SECONDS)

    def stuck_reason(self) -> str:
        """Return the reason why a restart would help; "" if it would not."""
        silent = time.monotonic() - self.resync.last_attempt
        if silent > 2 * self._settings.resync_seconds + 300:
            return f"no list was attempted for {silent:.0f} s"
        oldest = self.workers.longest_turn_seconds
        return f"a turn has run for {oldest:.0f} s" if oldest > 2 * TURN_SECONDS else ""

    def update_metrics(self) -> None:
        """Update the gauges; called before metrics are read."""
        self._metrics.count_pods(self.cache.pods.all())
        self._metrics.count_swarms(stored.view.status for stored in self.cache.swarms.all())

    async def _resync_with_retries(self) -> set[str]:
        """List everything, with retries; return the swarms that the list changed."""
        pause, last_problem = 0.5, ""
        while True:
            try:
                return await self.resync.resync_all()
            except KubeError:
                if self.resync.problem != last_problem:
                    last_problem = self.resync.problem
                    log.warning("cannot list the cluster's objects yet: %s", last_problem)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(MAX_PAUSE_SECONDS, pause * 2)

    async def _resync_periodically(self) -> None:
        every = self._settings.resync_seconds
        for number in itertools.count(1):
            try:
                async with asyncio.timeout(every * random.uniform(0.9, 1.1)):
                    await self._resync_requested.wait()
            except TimeoutError:
                pass  # the interval is over
            self._resync_requested.clear()
            changed = await self._resync_with_retries()
            self._resync_done.set()
            self.workers.api_recovered()
            chosen = self.cache.uids() if number % RESYNCS_PER_FULL_ROUND == 0 else changed
            self.workers.enqueue_spread(chosen, every * RESYNC_SPREAD)

    async def _watch_forever(self) -> None:
        """Restart kopf whenever it ends: after a pause, and after a list of the missed changes."""
        pause = 0.5
        while True:
            kinds = [kind for kind in WATCHED if kind is not NODE or self.cache.can_read_nodes]
            namespaces = self._settings.namespaces
            watch = Watch(self._settings.kubeconfig, namespaces, kinds, self._on_watch_event)
            started = time.monotonic()
            reason = await watch.run()
            pause = 0.5 if time.monotonic() - started > 60 else min(MAX_PAUSE_SECONDS, pause * 2)
            log.warning("the watches ended and start again in %.1f s: %s", pause, reason)
            self._metrics.watch_restarts.inc()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            self._resync_done.clear()
            self._resync_requested.set()
            await self._resync_done.wait()  # objects that cannot be listed cannot be watched

    def _on_watch_event(self, kind: Kind, happened: str, raw: Json) -> None:
        self._metrics.watch_events.labels(kind.plural, happened or "LISTED").inc()
        self._enqueue(self.cache.apply_event(kind, happened == "DELETED", raw))
