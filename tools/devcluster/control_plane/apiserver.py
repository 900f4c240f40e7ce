"""kube-apiserver: one process, or several on the same etcd.

Used by `ApiLevel`. Knows nothing of nodes; `address` is loopback, or an address of the cluster's own network.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tools.devcluster.build.build import program_path
from tools.devcluster.control_plane.pki import Pki
from tools.devcluster.layout import Layout
from tools.devcluster.processes import Processes
from tools.devcluster.waiting import wait_for

READY_SECONDS = 300.0
ISSUER = "https://kubernetes.default.svc"
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "omitManagedFields": True,
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True, slots=True)
class ApiServerSettings:
    """The flags of one API server."""

    name: str  # of the process
    address: str  # the only one that it listens on
    port: int
    etcd_url: str
    service_cidr: str
    first_service_ip: str
    toleration_seconds: int  # of pods, for nodes that are not ready or unreachable
    pods_reach_it: bool  # else the `kubernetes` Service gets no endpoint
    audit_log: Path | None = None
    extra: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"


def start_apiserver(
    settings: ApiServerSettings, layout: Layout, processes: Processes, pki: Pki
) -> None:
    """Start it, and return when /readyz says ok."""
    command = [program_path("kube-apiserver"), *_serving(settings, pki), *_trust(pki)]
    command += _behaviour(settings, layout)
    processes.start(settings.name, command)
    wait_ready(settings, processes, pki)


def wait_ready(
    settings: ApiServerSettings, processes: Processes, pki: Pki, seconds: float = READY_SECONDS
) -> None:
    context = _admin_tls(pki)

    def ready() -> bool:
        processes.check_running(settings.name)
        try:
            with urllib.request.urlopen(
                f"{settings.url}/readyz", timeout=5, context=context
            ) as answer:
                return bool(answer.read() == b"ok")
        except (urllib.error.URLError, OSError):
            return False

    name = settings.name
    wait_for(f"{name} ready", ready, seconds, explain=lambda: processes.log_end(name))


def _admin_tls(pki: Pki) -> ssl.SSLContext:
    admin = pki.client("admin", "system:masters")
    context = ssl.create_default_context(cafile=str(pki.ca.certificate))
    context.load_cert_chain(str(admin.certificate), str(admin.key))
    return context


def _serving(settings: ApiServerSettings, pki: Pki) -> list[str | Path]:
    names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
    addresses = {"127.0.0.1": None, settings.address: None, settings.first_service_ip: None}
    own = pki.server("kube-apiserver", names, tuple(addresses))
    reconciler = "lease" if settings.pods_reach_it else "none"
    return [
        f"--bind-address={settings.address}",
        f"--advertise-address={settings.address}",
        f"--secure-port={settings.port}",
        f"--endpoint-reconciler-type={reconciler}",
        f"--tls-cert-file={own.certificate}",
        f"--tls-private-key-file={own.key}",
    ]


def _trust(pki: Pki) -> list[str | Path]:
    accounts = pki.signing_pair("service-accounts")
    kubelet = pki.client("kube-apiserver-kubelet-client", "system:masters")
    front = pki.client("front-proxy-client", by=pki.front_proxy_ca)
    return [
        f"--client-ca-file={pki.ca.certificate}",
        "--authorization-mode=Node,RBAC",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-key-file={accounts.certificate}",
        f"--service-account-signing-key-file={accounts.key}",
        f"--kubelet-client-certificate={kubelet.certificate}",
        f"--kubelet-client-key={kubelet.key}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={pki.front_proxy_ca.certificate}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={front.certificate}",
        f"--proxy-client-key-file={front.key}",
    ]


def _behaviour(settings: ApiServerSettings, layout: Layout) -> list[str | Path]:
    flags: list[str | Path] = [
        f"--etcd-servers={settings.etcd_url}",
        f"--service-cluster-ip-range={settings.service_cidr}",
        "--allow-privileged=true",
        "--enable-admission-plugins=NodeRestriction",
        f"--default-not-ready-toleration-seconds={settings.toleration_seconds}",
        f"--default-unreachable-toleration-seconds={settings.toleration_seconds}",
        *settings.extra,
    ]
    if settings.audit_log is not None:
        policy = layout.config / "audit-policy.json"
        policy.write_text(json.dumps(AUDIT_POLICY))
        flags += [f"--audit-policy-file={policy}", f"--audit-log-path={settings.audit_log}"]
    return flags
