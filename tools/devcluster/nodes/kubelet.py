"""kubelet of one node. Used by `Node`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.devcluster.build.build import program_path
from tools.devcluster.control_plane.kubeconfig import write_kubeconfig
from tools.devcluster.control_plane.pki import Pki
from tools.devcluster.network.network import Network
from tools.devcluster.processes import Processes

FIRST_PORT = 10250  # of node 1; the nodes share one network namespace


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    """The settings that differ between the kubelets of a cluster."""

    node: str
    index: int
    folder: Path
    runtime: Path  # containerd's socket
    group: str  # its control group
    server: str  # the API server's url
    labels: dict[str, str]


def start_kubelet(
    settings: KubeletSettings, network: Network, processes: Processes, pki: Pki, inside: int
) -> None:
    """Start it in the namespaces of the process `inside`, which are the node's."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    user = pki.client(f"system:node:{settings.node}", "system:nodes")
    kubeconfig = write_kubeconfig(
        settings.folder / "kubeconfig", settings.server, pki.ca.certificate, user
    )
    config = settings.folder / "config.json"
    config.write_text(json.dumps(_config(settings, network, pki), indent=1))
    labels = ",".join(f"{key}={value}" for key, value in settings.labels.items())
    processes.start(
        process_name(settings.node),
        (
            program_path("kubelet"),
            f"--config={config}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={settings.node}",
            f"--root-dir={settings.folder / 'root'}",
            f"--node-ip={network.node_ip(settings.index)}",
            f"--node-labels={labels}",
            f"--cert-dir={settings.folder / 'certificates'}",
        ),
        inside=inside,
    )


def process_name(node: str) -> str:
    return f"kubelet-{node}"


def _config(settings: KubeletSettings, network: Network, pki: Pki) -> dict[str, Any]:
    address = network.node_ip(settings.index)
    own = pki.server(
        f"kubelet-{settings.node}",
        (settings.node,),
        (address, "127.0.0.1"),
        f"system:node:{settings.node}",
    )
    resolver = settings.folder / "resolv.conf"
    resolver.write_text(f"nameserver {network.inner_ip}\n")
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "port": FIRST_PORT + settings.index - 1,
        "readOnlyPort": 0,
        "healthzPort": 0,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{settings.group}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": ["none"],
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{settings.runtime}",
        "clusterDNS": [network.inner_ip],
        "clusterDomain": "cluster.local",
        "resolvConf": str(resolver),
        "evictionHard": {
            "memory.available": "1Mi",
            "nodefs.available": "0%",
            "imagefs.available": "0%",
            "nodefs.inodesFree": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "oomScoreAdj": 0,
        "maxOpenFiles": 20000,
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 10,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(pki.ca.certificate)},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "tlsCertFile": str(own.certificate),
        "tlsPrivateKeyFile": str(own.key),
        "podLogsDir": str(settings.folder / "podlogs"),
        "volumePluginDir": str(settings.folder / "volume-plugins"),
    }
