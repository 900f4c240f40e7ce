"""One real node: a bridge, a containerd and a kubelet, with all their files and control groups below names of its own.

Used by `RealCluster`. A node can fail as machines fail, without a packet that says so, and come back.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from tools.devcluster.control_plane.pki import Pki
from tools.devcluster.layout import Layout
from tools.devcluster.network.network import Network, add_bridge, cut_off_node, reconnect_node
from tools.devcluster.nodes.cgroups import kill_group, make_group, remove_group
from tools.devcluster.nodes.containerd import Containerd, shim_sockets
from tools.devcluster.nodes.kubelet import KubeletSettings, process_name, start_kubelet
from tools.devcluster.nodes.machine import Machine
from tools.devcluster.processes import Processes


class Node:
    """One node of a cluster. `index` counts from 1."""

    def __init__(self, layout: Layout, octet: int, index: int, processes: Processes) -> None:
        self.index = index
        self.name = f"n{index}"
        self.folder = layout.node(self.name)
        self.runtime = Containerd(self.name, self.folder / "containerd", processes)
        self._machine = Machine(self.name, self.folder, processes)
        self._inside = 0  # the pid whose namespaces are the node's
        self._octet = octet
        self._processes = processes

    @property
    def group(self) -> str:
        return f"modelswarm-{self._octet}-{self.name}"

    def prepare(self, network: Network) -> None:
        """Make the bridge and the groups and start the runtime, so that images can be imported."""
        self.folder.mkdir(parents=True, exist_ok=True)
        make_group(self.group)
        add_bridge(network, self.index)
        self._machine.add_disk(network.holder, self.runtime.disk)
        self._boot(network)

    def join(self, network: Network, pki: Pki, server: str, labels: Mapping[str, str]) -> None:
        settings = KubeletSettings(
            node=self.name,
            index=self.index,
            folder=self.folder / "kubelet",
            runtime=self.runtime.socket,
            group=self.group,
            server=server,
            labels=dict(labels),
        )
        start_kubelet(settings, network, self._processes, pki, self._inside)

    def kill(self, network: Network) -> int:
        """Simulate a power cut: cut off the network first, so that no peer sees a connection close.

        Return how many processes its pods had.
        """
        cut_off_node(network, self.index)
        return self.kill_processes()

    def revive(self, network: Network, pki: Pki, server: str, labels: Mapping[str, str]) -> None:
        """Boot the same machine again: its images are there, its containers are not."""
        self._boot(network)
        reconnect_node(network, self.index)
        self.join(network, pki, server, labels)

    def stop_kubelet(self) -> None:
        """Kill only the kubelet: pods run on, and the node becomes NotReady."""
        self._processes.kill(process_name(self.name))

    def kill_processes(self) -> int:
        self._processes.kill(process_name(self.name))
        self.runtime.kill()
        killed = kill_group(self.group)
        self._machine.switch_off()
        return killed

    def remove(self) -> None:
        """Remove groups and files, after `kill_processes`. The mounts went with the machine."""
        remove_group(self.group)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(shim_sockets(self._octet, self.index), ignore_errors=True)

    def _boot(self, network: Network) -> None:
        self._inside = self._machine.boot(network.holder)
        self.runtime.remove_state()
        self.runtime.start(network, self.index, self._inside)
