"""Cluster DNS: coredns as a process in the cluster's network namespace, at an address that outlives every node.

Used by `RealCluster`. Names outside the cluster do not exist, so tests reach nothing there by accident.
"""

from __future__ import annotations

from tools.devcluster.build.build import program_path
from tools.devcluster.control_plane.kubeconfig import write_kubeconfig
from tools.devcluster.control_plane.pki import Pki
from tools.devcluster.layout import Layout
from tools.devcluster.network.network import Network
from tools.devcluster.processes import Processes

NAME = "coredns"
COREFILE = """\
cluster.local:53 {{
    bind {address}
    errors
    kubernetes cluster.local {{
        kubeconfig {kubeconfig}
        endpoint_pod_names
        ttl 5
    }}
}}
.:53 {{
    bind {address}
    errors
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def start_dns(
    layout: Layout, network: Network, processes: Processes, pki: Pki, server: str
) -> None:
    user = pki.client(NAME, "system:masters")
    kubeconfig = write_kubeconfig(
        layout.config / f"{NAME}.kubeconfig", server, pki.ca.certificate, user
    )
    corefile = layout.config / "Corefile"
    corefile.write_text(COREFILE.format(address=network.inner_ip, kubeconfig=kubeconfig))
    processes.start(NAME, (program_path(NAME), "-conf", corefile), inside=network.holder)
