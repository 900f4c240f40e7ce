"""A kubelet and a scheduler for pods that exist only in the API: binds them, and sets their status.

Used by the operator's tests without nodes. Runs in a thread; a test can set other states than ready.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
from support.kubernetes.api_client import MERGE, PODS, STRATEGIC, ApiClient, Json

from tools.devcluster.control_plane.api_level import ApiLevel

EVERY = 0.05
END_SECONDS = 120.0  # seconds; longer than the limit of a request
READY = "ready"
RUNNING = "running"  # not ready
PENDING = "pending"  # bound only
UNBOUND = "unbound"


def make_node(plain: ApiClient, name: str, **labels: str) -> None:
    """Make a Ready node with free capacity."""
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
    }
    if plain.find(f"/api/v1/nodes/{name}") is None:
        plain.post("/api/v1/nodes", node)
    set_node_ready(plain, name, True)


def set_node_ready(plain: ApiClient, name: str, ready: bool) -> None:
    condition = {
        "type": "Ready",
        "status": "True" if ready else "Unknown",
        "reason": "Test",
        "lastTransitionTime": now(),
        "lastHeartbeatTime": now(),
    }
    room = {"cpu": "64", "memory": "512Gi", "pods": "500"}
    status = {"conditions": [condition], "allocatable": room, "capacity": room}
    plain.patch(f"/api/v1/nodes/{name}/status", {"status": status}, STRATEGIC)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def set_status(plain: ApiClient, pod: Json, **status: Any) -> None:
    meta = pod["metadata"]
    plain.patch(
        f"{PODS.format(meta['namespace'])}/{meta['name']}/status",
        {"metadata": {"uid": meta["uid"]}, "status": status},
        MERGE,
    )


def running(ready: bool, restarts: int = 0) -> Json:
    """Return the status of a pod whose container runs."""
    conditions = [
        {"type": kind, "status": "True" if ready or kind == "PodScheduled" else "False"}
        for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ]
    container = {
        "name": "server",
        "image": "localhost/x",
        "imageID": "x",
        "ready": ready,
        "started": True,
        "restartCount": restarts,
        "state": {"running": {"startedAt": now()}},
    }
    return {
        "phase": "Running",
        "podIP": "10.1.2.3",
        "podIPs": [{"ip": "10.1.2.3"}],
        "conditions": conditions,
        "containerStatuses": [container],
    }


def failed(reason: str, exit_code: int = 1, message: str = "") -> Json:
    """Return the status of a pod that has ended."""
    ended = {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": now()}
    container = {
        "name": "server",
        "image": "localhost/x",
        "imageID": "x",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": ended},
    }
    return {
        "phase": "Failed",
        "reason": reason,
        "message": message,
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [container],
    }


class FakeKubelet:
    """Serves all pods of one namespace. It calls `target_state` repeatedly for each pod."""

    def __init__(self, level: ApiLevel, namespace: str, nodes: tuple[str, ...]) -> None:
        self.target_state: Callable[[Json], str]
        self.ends_pod: Callable[[Json], bool]  # True: a deleted pod ends
        self.nodes: tuple[str, ...]  # pods are bound to these in turn
        self._all_nodes = nodes
        self.reset()
        self._plain = ApiClient(level)
        self._path = PODS.format(namespace)
        self._bound = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.errors: list[str] = []

    def reset(self) -> None:
        """Let every pod become ready, on any node, and end when it is deleted."""
        self.target_state = lambda pod: READY
        self.ends_pod = lambda pod: True
        self.nodes = self._all_nodes

    def __enter__(self) -> FakeKubelet:
        for name in self.nodes:
            make_node(self._plain, name)
        if self.nodes:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.nodes:
            self._thread.join(END_SECONDS)
            assert not self._thread.is_alive(), "the kubelet's request does not end"
        self._plain.close()

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            try:
                for pod in self._plain.items(self._path):
                    self._see_to(pod)
            except httpx.HTTPError as error:
                self.errors.append(str(error))  # a killed API server or a deleted pod

    def _see_to(self, pod: Json) -> None:
        meta, phase = pod["metadata"], pod["status"].get("phase")
        path = f"{self._path}/{meta['name']}"
        if meta.get("deletionTimestamp"):
            if self.ends_pod(pod):
                self._plain.delete(path, gracePeriodSeconds=0, preconditions={"uid": meta["uid"]})
            return
        fate = self.target_state(pod)
        if fate == UNBOUND or phase in ("Failed", "Succeeded"):
            return
        if not pod["spec"].get("nodeName"):
            self._bind(pod)
        elif fate in (READY, RUNNING) and _is_ready(pod) != (fate == READY):
            set_status(self._plain, pod, **running(fate == READY))

    def _bind(self, pod: Json) -> None:
        node = self.nodes[self._bound % len(self.nodes)]
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": target,
        }
        self._plain.post(f"{self._path}/{name}/binding", body)
        self._bound += 1


def _is_ready(pod: Json) -> bool | None:
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] == "Ready":
            return bool(condition["status"] == "True")
    return None
