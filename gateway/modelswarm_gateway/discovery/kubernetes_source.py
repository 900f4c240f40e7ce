"""The swarms of a Kubernetes cluster as the gateway's source: its API server, the book of pods and their watches.

Made by `main.py` for `--kubernetes`, and only then imported: the client of Kubernetes takes time and memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from modelswarm.errors import UserError
from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.api_server import ApiServer, Unreachable
from modelswarm_gateway.discovery.dialer import Endpoint
from modelswarm_gateway.discovery.pod_reflector import PodReflector, unready_reason
from modelswarm_gateway.discovery.pod_store import PodStore


class KubernetesSource:
    def __init__(
        self,
        kubeconfig: Path | None,
        namespaces: Sequence[str],
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        """No namespaces: all of them."""
        self._kubeconfig = kubeconfig
        self._api = ApiServer(kubeconfig)
        self._store = PodStore()
        self.on_change: Callable[[], None] = lambda: None
        scopes = dict.fromkeys(namespaces) or ("",)
        self._reflectors = [
            PodReflector(self._api, scope, self._store, self._changed, clock, jitter)
            for scope in scopes
        ]

    async def check(self) -> None:
        """UserError when nothing says where the API server is. It need not answer."""
        try:
            await self._api.check()
        except Unreachable as error:
            field = "--kubernetes" if self._kubeconfig is None else "--kubeconfig"
            raise UserError(field, str(error)) from error

    def endpoints(self) -> Mapping[PeerId, Endpoint]:
        return self._store.endpoints()

    def expected_models(self) -> frozenset[str]:
        return self._store.expected_models()

    def unready_reason(self) -> str | None:
        """Why it does not know yet who exists."""
        return unready_reason(self._reflectors)

    def pod_states(self) -> Mapping[str, int]:
        """How many there are in each state."""
        return self._store.pod_states()

    @property
    def failures(self) -> int:
        """Of requests to the API server."""
        return sum(watch.failures for watch in self._reflectors)

    @property
    def watch_down(self) -> bool:
        """Changes to some pods are not heard of at the moment."""
        return any(watch.problem is not None or not watch.listed for watch in self._reflectors)

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for watch in self._reflectors:
                    group.create_task(watch.run())
        finally:
            await self._api.close()

    def _changed(self) -> None:
        self.on_change()
