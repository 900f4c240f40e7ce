"""A Kubernetes API without nodes: etcd, kube-apiserver and, when asked for, the controllers, the scheduler and kwok.

Used by tests at API level and as the control plane of `RealCluster`. Everything listens on loopback unless told
otherwise. Its parts can be killed, paused and started again one by one.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tools.devcluster.control_plane import apiserver, controllers, etcd, kwok
from tools.devcluster.control_plane.kubeconfig import write_kubeconfig
from tools.devcluster.control_plane.kubectl import Kubectl
from tools.devcluster.control_plane.pki import Pki
from tools.devcluster.layout import Layout
from tools.devcluster.network.namespaces import own_namespace
from tools.devcluster.network.ports import free_ports
from tools.devcluster.processes import Processes
from tools.devcluster.reporting import Report, progress

APISERVER = "kube-apiserver"
STOP_SECONDS = 30.0  # an API server drains its watches when it is asked to stop


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The processes to start, and the addresses they listen on."""

    controller_manager: bool = False
    scheduler: bool = False
    kwok: bool = False
    audit: bool = False
    address: str = "127.0.0.1"
    service_cidr: str = "10.96.0.0/16"
    first_service_ip: str = "10.96.0.1"
    pods_reach_it: bool = False
    toleration_seconds: int = 10
    node_grace_seconds: int = 15  # until a silent node is NotReady; Kubernetes' own default is 50
    apiserver_flags: tuple[str, ...] = ()
    ends_with_owner: bool = True  # the process that starts it


class ApiLevel:
    """A running control plane; `kubectl` is its administrator."""

    def __init__(
        self,
        layout: Layout,
        settings: ApiSettings,
        *,
        processes: Processes | None = None,  # of a larger cluster
        report: Report = progress,
    ) -> None:
        self.layout = layout.make()
        self.settings = settings
        self.processes = processes or Processes(layout, ends_with_owner=settings.ends_with_owner)
        self.pki = Pki(layout.pki)
        self._report = report
        self._servers: dict[str, apiserver.ApiServerSettings] = {}
        self._etcd: etcd.Etcd | None = None

    def start(self) -> ApiLevel:
        with self._report("etcd"):
            self._etcd = etcd.start_etcd(self.layout, self.processes)
        with self._report(APISERVER):
            url = self.add_apiserver(APISERVER)
        write_kubeconfig(
            self.layout.kubeconfig,
            url,
            self.pki.ca.certificate,
            self.pki.client("admin", "system:masters"),
        )
        parts = (self.layout, self.processes, self.pki, url)
        if self.settings.controller_manager:
            with self._report(controllers.MANAGER):
                controllers.start_controller_manager(*parts, self.settings.node_grace_seconds)
        if self.settings.scheduler:
            with self._report(controllers.SCHEDULER):
                controllers.start_scheduler(*parts)
        if self.settings.kwok:
            with self._report(kwok.NAME):
                kwok.start_kwok(*parts)
        return self

    @property
    def url(self) -> str:
        return self._servers[APISERVER].url

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(self.kubeconfig)

    @property
    def audit_log(self) -> Path:
        """One JSON line per request; only with `audit`."""
        return self.layout.logs / f"audit-{APISERVER}.jsonl"

    def add_apiserver(self, name: str) -> str:
        """Start another API server on the same etcd, and return its url. Stop and start it by its name."""
        if self._etcd is None:
            raise RuntimeError("etcd was not started")
        audit = self.layout.logs / f"audit-{name}.jsonl" if self.settings.audit else None
        settings = apiserver.ApiServerSettings(
            name=name,
            address=self.settings.address,
            port=free_ports(1, self.settings.address)[0],
            etcd_url=self._etcd.url,
            service_cidr=self.settings.service_cidr,
            first_service_ip=self.settings.first_service_ip,
            toleration_seconds=self.settings.toleration_seconds,
            pods_reach_it=self.settings.pods_reach_it,
            audit_log=audit,
            extra=self.settings.apiserver_flags,
        )
        self._servers[name] = settings
        apiserver.start_apiserver(settings, self.layout, self.processes, self.pki)
        return settings.url

    def stop_apiserver(self, name: str = APISERVER, *, kill: bool = True) -> None:
        if kill:
            self.processes.kill(name)
        else:
            self.processes.stop(name, STOP_SECONDS)

    def start_apiserver(self, name: str = APISERVER, *, extra: tuple[str, ...] = ()) -> None:
        """Start it again after `stop_apiserver`, on the same port. `extra`: flags for this start only."""
        settings = dataclasses.replace(
            self._servers[name], extra=(*self.settings.apiserver_flags, *extra)
        )
        apiserver.start_apiserver(settings, self.layout, self.processes, self.pki)

    def restart_apiserver(self, name: str = APISERVER) -> None:
        self.stop_apiserver(name)
        self.start_apiserver(name)

    def pause_apiserver(self, name: str = APISERVER) -> None:
        """Stop it by SIGSTOP: connections stay open, and no request is answered."""
        self.processes.pause(name)

    def resume_apiserver(self, name: str = APISERVER) -> None:
        self.processes.resume(name)
        apiserver.wait_ready(self._servers[name], self.processes, self.pki)

    def stop_etcd(self) -> None:
        self.processes.kill(etcd.NAME)

    def start_etcd(self) -> None:
        """Start it again after `stop_etcd`, on the same data and ports."""
        self._etcd = etcd.start_etcd(self.layout, self.processes, self._etcd)

    def user_kubeconfig(self, user: str, group: str = "", server: str = "") -> Path:
        """Write a kubeconfig for a user with a client certificate. Rights come from RBAC alone."""
        file = (
            self.layout.config / f"user-{user.replace(':', '-')}-{uuid.uuid4().hex[:5]}.kubeconfig"
        )
        pair = self.pki.client(user, group)
        return write_kubeconfig(file, server or self.url, self.pki.ca.certificate, pair)

    def service_account_kubeconfig(
        self, namespace: str, name: str, *, server: str = "", hours: int = 24
    ) -> Path:
        """Write a kubeconfig with a token from the TokenRequest API, as a pod of that ServiceAccount has."""
        kubectl = self.kubectl.in_namespace(namespace)
        token = kubectl("create", "token", name, f"--duration={hours}h").strip()
        file = self.layout.config / f"account-{namespace}-{name}-{uuid.uuid4().hex[:5]}.kubeconfig"
        return write_kubeconfig(file, server or self.url, self.pki.ca.certificate, token)

    def namespace(self, prefix: str = "test") -> AbstractContextManager[str]:
        """Make a namespace that enforces Pod Security `restricted`; at the end it is deleted without waiting."""
        return own_namespace(self.kubectl, prefix)

    def audit_events(self) -> list[dict[str, object]]:
        """Return the audit events of all requests so far."""
        lines = self.audit_log.read_text().splitlines() if self.audit_log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def down(self) -> None:
        """Kill all processes; the folder stays."""
        for name in reversed(self.processes.names()):
            self.processes.kill(name)
