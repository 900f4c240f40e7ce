"""kube-proxy: Service addresses, in the cluster's network namespace. One serves all its nodes.

Used by `RealCluster`.
"""

from __future__ import annotations

import json

from tools.devcluster.build.build import program_path
from tools.devcluster.control_plane.kubeconfig import write_kubeconfig
from tools.devcluster.control_plane.pki import Pki
from tools.devcluster.layout import Layout
from tools.devcluster.network.network import Network
from tools.devcluster.processes import Processes

NAME = "kube-proxy"


def start_proxy(
    layout: Layout, network: Network, processes: Processes, pki: Pki, *, server: str, node: str
) -> None:
    """Start it; it takes the address of `node` for its own."""
    user = pki.client(f"system:{NAME}")
    kubeconfig = write_kubeconfig(
        layout.config / f"{NAME}.kubeconfig", server, pki.ca.certificate, user
    )
    config = layout.config / f"{NAME}.json"
    untouched = {
        "maxPerCore": 0,
        "min": 0,
        "tcpEstablishedTimeout": "0s",
        "tcpCloseWaitTimeout": "0s",
    }
    document = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": network.pods,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "hostnameOverride": node,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": untouched,
    }
    config.write_text(json.dumps(document))
    processes.start(NAME, (program_path(NAME), f"--config={config}"), inside=network.holder)
