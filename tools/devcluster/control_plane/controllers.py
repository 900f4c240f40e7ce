"""kube-controller-manager and kube-scheduler, which make an API server a cluster.

Used by `ApiLevel` when asked for. Node failures are noticed after 15 s, not 40, so that tests need not wait long.
"""

from __future__ import annotations

import json
from pathlib import Path

from tools.devcluster.build.build import program_path
from tools.devcluster.control_plane.kubeconfig import write_kubeconfig
from tools.devcluster.control_plane.pki import Pki
from tools.devcluster.layout import Layout
from tools.devcluster.network.ports import free_ports
from tools.devcluster.processes import Processes

MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"


def start_controller_manager(
    layout: Layout, processes: Processes, pki: Pki, server: str, grace_seconds: int = 15
) -> None:
    config = _own_kubeconfig(layout, pki, server, MANAGER)
    processes.start(
        MANAGER,
        (
            program_path(MANAGER),
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            f"--service-account-private-key-file={pki.signing_pair('service-accounts').key}",
            f"--root-ca-file={pki.ca.certificate}",
            f"--cluster-signing-cert-file={pki.ca.certificate}",
            f"--cluster-signing-key-file={pki.ca.key}",
            "--use-service-account-credentials",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_ports(1)[0]}",
            f"--node-monitor-grace-period={grace_seconds}s",
            "--node-monitor-period=2s",
        ),
    )


def start_scheduler(layout: Layout, processes: Processes, pki: Pki, server: str) -> None:
    kubeconfig = _own_kubeconfig(layout, pki, server, SCHEDULER)
    config = layout.config / "kube-scheduler.json"
    document = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "leaderElection": {"leaderElect": False},
    }
    config.write_text(json.dumps(document))
    processes.start(
        SCHEDULER,
        (
            program_path(SCHEDULER),
            f"--config={config}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_ports(1)[0]}",
        ),
    )


def _own_kubeconfig(layout: Layout, pki: Pki, server: str, name: str) -> Path:
    user = pki.client(f"system:{name}")
    return write_kubeconfig(layout.config / f"{name}.kubeconfig", server, pki.ca.certificate, user)
