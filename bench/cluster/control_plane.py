"""A control plane without real nodes for the operator's benchmarks, and the operator's process.

A real API server with controllers, scheduler and kwok; the operator with its own minimal permissions and its Lease;
swarms whose pods kwok makes Ready. Built from `tools/devcluster` and `tests/support/kubernetes`. Used by
`operator_converge` and `operator_idle`.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.kubernetes.api_client import PODS, SWARMS, ApiClient, Json, install_crd
from support.kubernetes.operator_process import ACCOUNT, Operator, grant

from tools.devcluster.control_plane.api_level import ApiLevel, ApiSettings
from tools.devcluster.control_plane.kwok import fake_node
from tools.devcluster.layout import Layout
from tools.devcluster.network.namespaces import own_namespace
from tools.devcluster.waiting import wait_for

NODES = 10
SPANS, REPLICAS = 5, 2  # ten pods per swarm
RESYNC_SECONDS = "60"  # the chart's default
POLL_SECONDS = 0.25
WRITES = {"create", "update", "patch", "delete", "deletecollection"}


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """One namespace with its operator as the leader."""

    level: ApiLevel
    namespace: str
    operator: Operator
    client: ApiClient

    def create_swarms(self, count: int) -> None:
        """Create swarms of ten pods each."""
        for number in range(count):
            self.client.post(SWARMS.format(self.namespace), _make_swarm(f"swarm-{number}"))

    def wait_ready(self, count: int, seconds: float) -> None:
        wait_for(
            f"{count} swarms to be ready",
            lambda: self._ready() == count,
            seconds,
            every=POLL_SECONDS,
            explain=lambda: f"{self._ready()} are ready\n{self.operator.text()[-3000:]}",
        )

    def _ready(self) -> int:
        return sum(map(is_ready, self.client.items(SWARMS.format(self.namespace))))

    def count_pods(self) -> int:
        return len(self.client.items(PODS.format(self.namespace)))

    def cpu_seconds(self) -> float:
        """Return the user and system time of the operator's process so far, in seconds."""
        stat = Path(f"/proc/{self.operator.process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        for line in Path(f"/proc/{self.operator.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("/proc shows no memory of the operator's process")

    def read_requests(self, skip: int = 0) -> tuple[int, list[tuple[str, str]]]:
        """Return (offset for the next call, verb and resource of each request of the operator) from the audit log.

        The API server writes the log a moment after its answer.
        """
        user = f"system:serviceaccount:{self.namespace}:{ACCOUNT}"
        with self.level.audit_log.open("rb") as log:
            log.seek(skip)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        events = (json.loads(line) for line in whole.splitlines())
        seen = [
            (str(event["verb"]), str(event.get("objectRef", {}).get("resource", "")))
            for event in events
            if event["user"]["username"] == user and event["stage"] == "ResponseComplete"
        ]
        return skip + len(whole), seen


@contextmanager
def control_plane(*, audit: bool) -> Iterator[ControlPlane]:
    settings = ApiSettings(
        controller_manager=True, scheduler=True, kwok=True, audit=audit, node_grace_seconds=50
    )
    with tempfile.TemporaryDirectory(prefix="modelswarm-bench-") as folder:
        level = ApiLevel(Layout(Path(folder)), settings)
        try:
            level.start()
            with own_namespace(level.kubectl, "bench") as namespace, ApiClient(level) as plain:
                yield from _start_operator(level, namespace, plain, Path(folder))
        finally:
            level.down()


def _start_operator(
    level: ApiLevel, namespace: str, plain: ApiClient, folder: Path
) -> Iterator[ControlPlane]:
    install_crd(level)
    grant(level, namespace)
    level.kubectl.apply(*(fake_node(f"node-{number}") for number in range(NODES)))
    for number in range(NODES):
        level.kubectl.wait_condition("node", f"node-{number}", "Ready", 60)
    account = level.service_account_kubeconfig(namespace, ACCOUNT)
    flags = ("--resync", RESYNC_SECONDS)
    with Operator(account, namespace, folder, *flags, elect=True, fork=False) as operator:
        operator.wait_ready()
        wait_for("the operator to lead", operator.leads, 30)
        yield ControlPlane(level, namespace, operator, plain)
        operator.check_log()


def _make_swarm(name: str) -> Json:
    spec = {
        "model": {"source": "demo://counting", "servedName": name},
        "spans": {"count": SPANS},
        "replicas": REPLICAS,
    }
    return {
        "apiVersion": "modelswarm.io/v1alpha1",
        "kind": "ModelSwarm",
        "metadata": {"name": name},
        "spec": spec,
    }


def is_ready(swarm: dict[str, Any]) -> bool:
    """Return True if a swarm is Ready, not Progressing, and its status is of the newest generation."""
    status = swarm.get("status") or {}
    states = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    fresh = status.get("observedGeneration") == swarm["metadata"]["generation"]
    return fresh and states.get("Ready") == "True" and states.get("Progressing") == "False"


def seconds_since(began: float) -> float:
    return time.perf_counter() - began
