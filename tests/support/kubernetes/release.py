"""The chart installed in a real cluster, as tests of whole swarms use it: torch from this machine, small and quick.

`installed` gives a release in one namespace; `serve` applies a swarm and waits until it is Ready. The host reaches
Services and pods, so no port is forwarded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from support.kubernetes.chart import CHART

from tools.devcluster.control_plane.kubectl import Kubectl
from tools.devcluster.nodes.volumes import host_volume, site_packages, torch_mounted
from tools.devcluster.real import RealCluster

EXAMPLE = CHART.parents[1] / "examples" / "counting.yaml"
INSTALL_SECONDS = 180.0
READY_SECONDS = 240.0  # four servers import torch, two on each of two nodes that share this machine
SMALL = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}}
HTTP = 8000  # of a gateway's pod
VALUES: dict[str, Any] = {
    "image": {"pullPolicy": "Never"},
    "operator": {"resources": SMALL, "resyncSeconds": 5},
    "gateway": {"resources": SMALL, "leaveDelaySeconds": 3, "drainSeconds": 5, "holdSeconds": 60},
    "server": {"image": {"repository": "modelswarm/server-slim"}},
}


@dataclass(frozen=True, slots=True)
class Release:
    cluster: RealCluster
    kubectl: Kubectl

    @property
    def url(self) -> str:
        """Of the gateway's Service."""
        service = self.kubectl.get("service", "modelswarm-gateway")
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    def serve(self, document: Path = EXAMPLE, seconds: float = READY_SECONDS) -> str:
        """The name of the swarm, once it is Ready."""
        text = document.read_text(encoding="utf-8")
        name: str = yaml.safe_load(text)["metadata"]["name"]
        self.kubectl.apply(text)
        self.kubectl.wait_condition("modelswarm", name, "Ready", seconds)
        return name

    def answers(self, swarm: str) -> bool:
        """Through each of its gateways: Ready is the operator's word, and they link the last server after it."""
        for pod in self.kubectl.items("pods", "app.kubernetes.io/component=gateway"):
            url = f"http://{pod['status']['podIP']}:{HTTP}/v1/models"
            models = httpx.get(url, timeout=10).json()["data"]
            if not any(model["id"] == swarm and model["ready"] for model in models):
                return False
        return True

    def servers(self, swarm: str) -> list[dict[str, Any]]:
        """Its pods that are not on their way out."""
        chosen = f"modelswarm.io/swarm={swarm},modelswarm.io/role=server"
        pods = self.kubectl.items("pods", chosen)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


@contextmanager
def installed(
    cluster: RealCluster, namespace: str, folder: Path, more: Sequence[str] = ()
) -> Iterator[Release]:
    """In a namespace of its own; gone afterwards, with its swarms."""
    kubectl = cluster.kubectl.within(namespace)
    claim = host_volume(kubectl, "torch", site_packages(), namespace)
    values = folder / "values.yaml"
    template = torch_mounted(claim)
    template["spec"]["containers"][0]["resources"] = SMALL
    values.write_text(
        json.dumps({**VALUES, "serverPodTemplate": template, "watchNamespaces": [namespace]})
    )
    words = (
        "upgrade",
        "--install",
        "modelswarm",
        str(CHART),
        "-f",
        str(values),
        "--take-ownership",
    )
    kubectl.helm(*words, "--wait", f"--timeout={INSTALL_SECONDS:.0f}s", *more)
    try:
        yield Release(cluster, kubectl)
    finally:
        kubectl("delete", "modelswarms", "--all", "--timeout=60s", seconds=90)
        kubectl.helm("uninstall", "modelswarm", "--wait=hookOnly")
