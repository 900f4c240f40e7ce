"""Watches the start of a swarm from a thread of its own, because `LocalSwarm.start` returns only at its end.

Used by `up` and `up --json`; each passes a function that shows what was seen. Prints nothing itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from modelswarm.client.swarm import SwarmClient
from modelswarm.local.start_state import IMPORTING
from modelswarm.local.supervisor import JobState, JobStatus
from modelswarm.local.swarm import LocalServer, LocalSwarm
from modelswarm.process.start_progress import StartProgress

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class StartView:
    """The processes of a starting swarm at one moment."""

    servers: Sequence[LocalServer]
    gateways: Sequence[JobStatus]
    gateway_progress: Mapping[str, StartProgress]

    def progress(self) -> dict[str, StartProgress]:
        """Return the progress of all processes that are not ready, by name."""
        starting = {
            server.job_status.name: server.progress
            for server in self.servers
            if server.job_status.state is JobState.STARTING
        }
        for gateway in self.gateways:
            if gateway.state in (JobState.STARTING, JobState.READY):
                starting[gateway.name] = self.gateway_progress[gateway.name]
        return {name: each for name, each in starting.items() if not each.is_ready}


class StartWatch:
    """A context in which the swarm is started; `show` is called every POLL_SECONDS, on the watching thread."""

    def __init__(self, swarm: LocalSwarm, show: Callable[[StartView], None]) -> None:
        self._swarm, self._show = swarm, show
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="start-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with ExitStack() as stack:
            clients: dict[str, SwarmClient] = {}
            while not self._ended.wait(POLL_SECONDS):
                if not self._swarm.has_processes:
                    continue
                gateways = self._swarm.gateways
                for gateway in gateways:
                    target = self._swarm.gateway_target(gateway.name)
                    if target is not None and gateway.name not in clients:
                        clients[gateway.name] = stack.enter_context(SwarmClient(target))
                progress = {each.name: self._progress_of(each, clients) for each in gateways}
                self._show(StartView(self._swarm.servers, gateways, progress))

    def _progress_of(self, gateway: JobStatus, clients: Mapping[str, SwarmClient]) -> StartProgress:
        client = clients.get(gateway.name)
        if client is None or gateway.state is not JobState.READY:
            return IMPORTING
        return self._swarm.fetch_gateway_progress(client)
