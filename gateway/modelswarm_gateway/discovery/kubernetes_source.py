"""Endpoint source in a cluster: the pods of servers, from a store that reflectors keep up to date.

Made by `app.py` for `--kubernetes`, and imported only then: the Kubernetes client takes time and memory. Dials nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from modelswarm.errors import UserError
from modelswarm.kube.client import KubeClient, is_in_pod
from modelswarm.kube.errors import UnreachableError
from modelswarm.protocol.identity import PeerId
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
        """`namespaces`: those to watch; empty: all."""
        self._kubeconfig = kubeconfig
        self._client = KubeClient(
            kubeconfig,
            user_agent="modelswarm-gateway",
            in_cluster=is_in_pod(),  # elsewhere without a kubeconfig: the user's default file
        )
        self._store = PodStore()
        self.on_change: Callable[[], None] = lambda: None
        scopes = dict.fromkeys(namespaces) or ("",)
        self._reflectors = [
            PodReflector(self._client, scope, self._store, self._changed, clock, jitter)
            for scope in scopes
        ]

    async def check_config(self) -> None:
        """Raise UserError if no configuration names the API server. The API server need not respond."""
        try:
            await self._client.connect()
        except UnreachableError as error:
            field = "--kubernetes" if self._kubeconfig is None else "--kubeconfig"
            raise UserError(field, str(error)) from error

    def endpoints(self) -> Mapping[PeerId, Endpoint]:
        return self._store.endpoints()

    def is_listed(self) -> bool:
        return self.unready_reason() is None

    def expected_models(self) -> frozenset[str]:
        return self._store.expected_models()

    def unready_reason(self) -> str | None:
        """Return why the pods are not known yet; None when they are."""
        return unready_reason(self._reflectors)

    def pod_states(self) -> Mapping[str, int]:
        """Return the number of pods in each state."""
        return self._store.pod_states()

    @property
    def api_failures(self) -> int:
        """Number of failed requests to the API server."""
        return sum(watch.failures for watch in self._reflectors)

    @property
    def is_watch_down(self) -> bool:
        """True while changes to some pods are not received."""
        return any(watch.problem is not None or not watch.has_listed for watch in self._reflectors)

    async def run(self) -> None:
        """Run all reflectors until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for watch in self._reflectors:
                    group.create_task(watch.run())
        finally:
            await self._client.close()

    def _changed(self) -> None:
        self.on_change()
