"""A foreign cluster: `CLUSTER=existing` with `KUBECONFIG`.

Used by `make cluster` and the fixtures. It takes requests and objects; nothing of it may be killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.devcluster.control_plane.kubectl import Kubectl


@dataclass(frozen=True, slots=True)
class ExistingCluster:
    """The part that every kind of cluster has."""

    kubeconfig: Path

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(self.kubeconfig)

    def describe(self) -> str:
        nodes = [node["metadata"]["name"] for node in self.kubectl.items("nodes")]
        return f"{len(nodes)} nodes ({', '.join(nodes[:5])})"
