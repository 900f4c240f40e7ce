"""kwok: fake nodes, which are only objects, and whose pods become Running without a kubelet.

Used by `ApiLevel` when asked for, and by tests with many nodes or many pods. Only nodes of `fake_node` are managed;
real nodes beside them are not touched.
"""

from __future__ import annotations

from typing import Any

from tools.devcluster.build.build import program_path
from tools.devcluster.control_plane.kubeconfig import write_kubeconfig
from tools.devcluster.control_plane.pki import Pki
from tools.devcluster.layout import Layout
from tools.devcluster.network.ports import free_ports
from tools.devcluster.processes import Processes

NAME = "kwok"
MARK = ("kwok.x-k8s.io/node", "fake")
GPU = "nvidia.com/gpu"


def start_kwok(layout: Layout, processes: Processes, pki: Pki, server: str) -> None:
    user = pki.client("kwok", "system:masters")
    config = write_kubeconfig(layout.config / "kwok.kubeconfig", server, pki.ca.certificate, user)
    processes.start(
        NAME,
        (
            program_path("kwok"),
            f"--kubeconfig={config}",
            "--manage-all-nodes=false",
            f"--manage-nodes-with-annotation-selector={'='.join(MARK)}",
            "--node-lease-duration-seconds=40",  # without Leases its heartbeats are too rare
            f"--server-address=127.0.0.1:{free_ports(1)[0]}",
        ),
    )


def fake_node(
    name: str,
    *,
    gpus: int = 0,
    cpu: str = "64",
    memory: str = "512Gi",
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return a Node object; apply it, and kwok keeps it Ready."""
    capacity = {"cpu": cpu, "memory": memory, "pods": "250"} | ({GPU: str(gpus)} if gpus else {})
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {MARK[0]: MARK[1]},
            "labels": {"kubernetes.io/hostname": name, "type": "kwok", **(labels or {})},
        },
        "status": {"capacity": capacity, "allocatable": capacity},
    }
