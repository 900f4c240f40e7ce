"""One real node: a bridge, a containerd and a kubelet, with all their files and control groups below names of its own.

Used by `RealCluster`. A node can die as machines die (nobody hears from it again) and come back.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from tools.devcluster.control_plane.pki import Pki
from tools.devcluster.layout import Layout
from tools.devcluster.network.network import Network, add_bridge, silence, unsilence
from tools.devcluster.nodes.cgroups import kill_below, make_group, remove_group
from tools.devcluster.nodes.containerd import Containerd, shim_sockets
from tools.devcluster.nodes.kubelet import KubeletSettings, process_name, start_kubelet
from tools.devcluster.nodes.machine import Machine
from tools.devcluster.processes import Processes


class Node:
    """Its name, its address and its life. `index` counts from 1."""

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
        """The bridge, the groups and the runtime: images can be imported."""
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
        """As by a power cut: silence first, so that no peer sees a connection close.

        Returns how many processes its pods had.
        """
        silence(network, self.index)
        return self.kill_processes()

    def revive(self, network: Network, pki: Pki, server: str, labels: Mapping[str, str]) -> None:
        """The same machine, booted again: its images are there, its containers are not."""
        self._boot(network)
        unsilence(network, self.index)
        self.join(network, pki, server, labels)

    def stop_kubelet(self) -> None:
        """Only the kubelet: pods run on, the node turns NotReady."""
        self._processes.kill(process_name(self.name))

    def kill_processes(self) -> int:
        self._processes.kill(process_name(self.name))
        self.runtime.kill()
        killed = kill_below(self.group)
        self._machine.switch_off()
        return killed

    def remove(self) -> None:
        """After `kill_processes`: groups and files. The mounts went with the machine."""
        remove_group(self.group)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(shim_sockets(self._octet, self.index), ignore_errors=True)

    def _boot(self, network: Network) -> None:
        self._inside = self._machine.boot(network.holder)
        self.runtime.forget_running()
        self.runtime.start(network, self.index, self._inside)
