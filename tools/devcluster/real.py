"""A whole cluster on this machine: control plane, real nodes, Service addresses, DNS.

Used by `make cluster` and by tests that need running pods. Several can run at the same time: each has its own folder,
network namespace, addresses and control groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.devcluster.build import build
from tools.devcluster.build.images import base_archive, pause_archive
from tools.devcluster.build.preparation import CLUSTER_PARTS
from tools.devcluster.control_plane import kwok
from tools.devcluster.control_plane.api_level import ApiLevel, ApiSettings
from tools.devcluster.control_plane.controllers import MANAGER
from tools.devcluster.control_plane.kubectl import Kubectl
from tools.devcluster.down import remove_cluster, remove_orphans
from tools.devcluster.layout import Layout
from tools.devcluster.network.dns import start_dns
from tools.devcluster.network.network import Network, open_network
from tools.devcluster.nodes.guest import write_tools, write_values
from tools.devcluster.nodes.kubelet import process_name
from tools.devcluster.nodes.node import Node
from tools.devcluster.nodes.proxy import start_proxy
from tools.devcluster.nodes.volumes import host_volume
from tools.devcluster.processes import Processes
from tools.devcluster.record import write_record
from tools.devcluster.reporting import progress, tell
from tools.devcluster.waiting import wait_for

NODE_READY_SECONDS = 300.0
ZONE = "topology.kubernetes.io/zone"


@dataclass(frozen=True, slots=True)
class RealSettings:
    """Size of a cluster, and whether it outlives the process that starts it."""

    nodes: int = 2
    gpus: int = 4  # in every node's status; there are no devices
    kwok: bool = False
    audit: bool = False
    ends_with_owner: bool = True
    archives: tuple[Path, ...] = field(default=())  # imported before the nodes join


class RealCluster:
    """Running nodes n1, n2, ... in zones z1, z2, ...; `api` is their control plane."""

    def __init__(self, layout: Layout, settings: RealSettings) -> None:
        self.layout = layout.make()
        self.settings = settings
        self._processes = Processes(layout, ends_with_owner=settings.ends_with_owner)
        self._network: Network | None = None
        self._api: ApiLevel | None = None
        self._nodes: dict[str, Node] = {}

    def start(self) -> RealCluster:
        """Start everything, after removing what orphaned clusters have left."""
        write_record(self.layout, octet=-1, nodes=0, ends_with_owner=self.settings.ends_with_owner)
        for folder in remove_orphans():
            tell(f"an orphaned cluster in {folder} was taken down")
        for name in CLUSTER_PARTS:
            build.build_part(build.find_part(name))  # now, so that no start below takes minutes
        with progress("network"):
            self._network = open_network(self._processes)
        octet, count = self._network.octet, self.settings.nodes
        write_record(
            self.layout, octet=octet, nodes=count, ends_with_owner=self.settings.ends_with_owner
        )
        made = [Node(self.layout, octet, index + 1, self._processes) for index in range(count)]
        self._nodes = {node.name: node for node in made}
        self._start_control_plane()
        for node in made:
            with progress(f"node {node.name}: containerd"):
                node.prepare(self.network)
        self.import_images((pause_archive(), base_archive(), *self.settings.archives))
        self._start_nodes()
        write_tools(self.layout)
        write_values(self.layout)
        return self

    @property
    def api(self) -> ApiLevel:
        if self._api is None:
            raise RuntimeError("the cluster was not started")
        return self._api

    @property
    def network(self) -> Network:
        if self._network is None:
            raise RuntimeError("the cluster was not started")
        return self._network

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(self.kubeconfig)

    @property
    def nodes(self) -> list[str]:
        return list(self._nodes)

    def import_images(self, archives: Iterable[Path]) -> None:
        """Import images into the store of every node."""
        listed = list(archives)
        for archive in listed:
            with progress(f"image {archive.name}"):
                self.import_image(archive)

    def import_image(self, archive: Path) -> None:
        with ThreadPoolExecutor(len(self._nodes)) as pool:
            list(pool.map(lambda node: node.runtime.import_image(archive), self._nodes.values()))

    def kill_node(self, name: str) -> int:
        """Simulate a power cut: all processes of the node end, and no packet says so. Return how many."""
        return self._nodes[name].kill(self.network)

    def revive_node(self, name: str, *, wait: bool = True) -> None:
        node = self._nodes[name]
        node.revive(self.network, self.api.pki, self.api.url, self._labels(node))
        if wait:
            self._wait_ready(name)

    def stop_kubelet(self, name: str) -> None:
        """The node becomes NotReady while its pods run on. `start_kubelet` ends that."""
        self._nodes[name].stop_kubelet()

    def start_kubelet(self, name: str) -> None:
        node = self._nodes[name]
        node.join(self.network, self.api.pki, self.api.url, self._labels(node))

    def container_pids(self, pod: str, namespace: str) -> list[int]:
        """Return the first process of each container of a pod, by the host's pids, for tests that kill it."""
        return self._pids(self.kubectl.in_namespace(namespace).get("pod", pod))

    def main_pids(self, namespace: str) -> dict[str, list[int]]:
        """Return the same of all running pods: to look a pod up takes too long at the moment of a kill."""
        pods = self.kubectl.in_namespace(namespace).items("pods")
        running = (pod for pod in pods if pod["status"]["phase"] == "Running")
        return {pod["metadata"]["name"]: self._pids(pod) for pod in running}

    def _pids(self, found: dict[str, Any]) -> list[int]:
        runtime = self._nodes[found["spec"]["nodeName"]].runtime
        statuses = found["status"].get("containerStatuses", [])
        identities = [status["containerID"].removeprefix("containerd://") for status in statuses]
        return runtime.pids(identities)

    def host_volume(self, name: str, path: Path, namespace: str) -> str:
        return host_volume(self.kubectl, name, path, namespace)

    def set_gpus(self, node: str, count: int) -> None:
        status = {"status": {"capacity": {kwok.GPU: str(count)}}}
        self.kubectl("patch", "node", node, "--subresource=status", "-p", json.dumps(status))

    def down(self) -> str:
        """Remove it. Raises if anything is left."""
        return remove_cluster(self.layout, self._processes)

    def _start_control_plane(self) -> None:
        network = self.network
        settings = ApiSettings(
            controller_manager=True,
            scheduler=True,
            kwok=self.settings.kwok,
            audit=self.settings.audit,
            address=network.host_ip,
            service_cidr=network.services,
            first_service_ip=network.first_service,
            pods_reach_it=True,
            ends_with_owner=self.settings.ends_with_owner,
        )
        self._api = ApiLevel(self.layout, settings, processes=self._processes).start()

    def _start_nodes(self) -> None:
        api, parts = self.api, (self.layout, self.network, self._processes, self.api.pki)
        for node in self._nodes.values():
            node.join(self.network, api.pki, api.url, self._labels(node))
        with progress("coredns, kube-proxy"):
            start_dns(*parts, api.url)
        with progress(f"nodes {', '.join(self._nodes)} ready"):
            for name in self._nodes:
                self._wait_ready(name)
                if self.settings.gpus:
                    self.set_gpus(name, self.settings.gpus)
            start_proxy(*parts, server=api.url, node=self.nodes[0])
        with progress("service account of the default namespace"):
            self._wait_for_pods_to_be_allowed()

    def _wait_for_pods_to_be_allowed(self) -> None:
        """Pods are refused until the controller manager has made the account of their namespace."""
        wait_for(
            "the service account default/default",
            lambda: self.kubectl.find("serviceaccount", "default") is not None,
            NODE_READY_SECONDS,
            explain=lambda: self._processes.log_end(MANAGER, 40),
        )

    def _wait_ready(self, name: str) -> None:
        kubelet = process_name(name)
        self._processes.check_running(kubelet)
        wait_for(
            f"node {name} Ready",
            lambda: self.kubectl.condition("node", name, "Ready") == "True",
            NODE_READY_SECONDS,
            explain=lambda: self._processes.log_end(kubelet, 40),
        )

    def _labels(self, node: Node) -> dict[str, str]:
        return {ZONE: f"z{node.index}"}
