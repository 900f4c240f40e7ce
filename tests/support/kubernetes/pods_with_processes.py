"""A swarm whose pods exist in a real API server while their processes run here: the tests act as the kubelet.

Every pod has its own loopback address, so that its server listens on port 7000 as in a cluster. Used by the tests of
the gateway's discovery. Without scheduler and garbage collector, a deleted pod stays Terminating until `remove_pod`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from support.eventually import eventually
from support.processes.swarm import ENDLESS, MODEL, Endpoints, HashSwarm

from tools.devcluster.control_plane.api_level import ApiLevel

ACCOUNT = "gateway"
_ADDRESSES = itertools.count(2)
_RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER = {
    "name": "server",
    "image": "localhost/nothing:1",
    "ports": [{"name": "links", "containerPort": 7000}],
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}
_SCRAPED = {"prometheus.io/scrape": "true", "prometheus.io/port": "7001"}


def new_address() -> str:
    """Return a loopback address without listeners; another test run may run at the same time."""
    return f"127.{1 + os.getpid() % 250}.{1 + os.getpid() // 250 % 250}.{next(_ADDRESSES)}"


class PodSwarm(HashSwarm):
    """Servers of one namespace as pods, and gateways that discover them."""

    def __init__(self, root: Path, api: ApiLevel, namespace: str) -> None:
        super().__init__(root, context=ENDLESS)
        self.found_by = ()
        self.api, self.namespace = api, namespace
        self.kubectl = api.kubectl.in_namespace(namespace)
        self.addresses: dict[str, str] = {}
        self._lives: dict[str, tuple[str, ...]] = {}

    def start_pod(
        self,
        name: str,
        blocks: str,
        *flags: str,
        model: str = MODEL,
        incarnation: int = 1,
        address: str = "",
        serves: bool = True,
    ) -> None:
        """Make a pod. With `serves`, start its server and wait until it is ready."""
        self.addresses[name] = address or new_address()
        labels = {
            "app.kubernetes.io/part-of": "modelswarm",
            "modelswarm.io/role": "server",
            "modelswarm.io/swarm": model,
            "modelswarm.io/incarnation": str(incarnation),
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": labels,
                "annotations": {**_SCRAPED, "modelswarm.io/served-name": model},
            },
            "spec": {
                "nodeName": "by-hand",
                "securityContext": _RESTRICTED,
                "containers": [_CONTAINER],
            },
        }
        self.kubectl.apply(pod)
        self._lives[name] = (
            *("--blocks", blocks, "--incarnation", str(incarnation), *flags),
            *("--model", f"file://{self.folder}", "--served-name", model, "--hash-model"),
        )
        if serves:
            self.run(name)
        else:
            self.set_pod_status(name)

    def start_pods(self, spans: Mapping[str, str], *flags: str, model: str = MODEL) -> None:
        """Make pods by name and blocks, and wait until all are ready."""
        for name, blocks in spans.items():
            self.start_pod(name, blocks, *flags, model=model, serves=False)
            self.launch(name)
        for name in spans:
            self.wait_serves(name)

    def run(self, name: str) -> None:
        """Start the server, or restart it, and wait until it is ready."""
        self.launch(name)
        self.wait_serves(name)

    def launch(self, name: str) -> None:
        address = self.addresses[name]
        links, metrics = f"{address}:7000", f"{address}:7001"
        self.start(
            name,
            "modelswarm_serving",
            *("--listen", links, "--advertise", links, "--metrics", metrics),
            *self._lives[name],
        )

    def wait_serves(self, name: str) -> None:
        eventually(f"{name} serves", lambda: self.serves(name))
        self.set_pod_status(name, ready=True)

    def serves(self, name: str) -> bool:
        try:
            url = f"http://{self.addresses[name]}:7001/ready"
            return httpx.get(url, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def set_pod_status(self, name: str, *, phase: str = "Running", ready: bool = False) -> None:
        """Write the status that a kubelet would write."""
        address = self.addresses[name]
        container = {
            "name": "server",
            "ready": ready,
            "restartCount": 0,
            "image": "localhost/nothing:1",
            "imageID": "",
            "containerID": f"by-hand://{self.processes[name].pid}"
            if name in self.processes
            else "",
        }
        status: dict[str, Any] = {
            "phase": phase,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "containerStatuses": [container],
        }
        patch = json.dumps({"status": status})
        self.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)

    def delete_pod(self, name: str) -> None:
        """Delete the pod. It becomes Terminating, and its process runs on."""
        self.kubectl("delete", "pod", name, "--wait=false", "--grace-period=60")

    def remove_pod(self, name: str) -> None:
        """End the process, and remove the pod."""
        self.kill(name, signal.SIGTERM)
        self.processes[name].wait(60)
        self.kubectl("delete", "pod", name, "--force", "--grace-period=0")

    def make_kubeconfig(self) -> Path:
        """Return a kubeconfig with exactly the rights that the chart gives a gateway in one namespace."""
        if self.kubectl.find("serviceaccount", ACCOUNT) is None:
            self.kubectl("create", "serviceaccount", ACCOUNT)
            rights = ("--verb=list", "--verb=watch", "--resource=pods")
            self.kubectl("create", "role", ACCOUNT, *rights)
            subject = f"--serviceaccount={self.namespace}:{ACCOUNT}"
            self.kubectl("create", "rolebinding", ACCOUNT, f"--role={ACCOUNT}", subject)
        return self.api.service_account_kubeconfig(self.namespace, ACCOUNT)

    def pod_gateway(self, *flags: str, name: str = "gateway", whole: int = 0) -> Endpoints:
        """Start a gateway that watches the pods; with `whole`, wait until it is linked to that many servers."""
        where = (
            "--kubernetes",
            "--namespace",
            self.namespace,
            "--kubeconfig",
            str(self.make_kubeconfig()),
        )
        endpoints = self.gateway(*where, *flags, name=name)
        if whole:
            eventually(f"{whole} servers are linked", lambda: self.linked(endpoints) == whole)
        return endpoints

    @staticmethod
    def linked(endpoints: Endpoints, model: str = MODEL) -> int:
        return int(endpoints.metric("modelswarm_gateway_servers", model=model))
