"""etcd: the store behind the API server. One member, on loopback, without waiting for the disk.

Used by `ApiLevel`. May be killed and started again on the same data.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass

from tools.devcluster.build.build import program_path
from tools.devcluster.layout import Layout
from tools.devcluster.network.ports import free_ports
from tools.devcluster.processes import Processes
from tools.devcluster.waiting import wait_for

NAME = "etcd"
READY_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Etcd:
    """The ports it listens on."""

    client_port: int
    peer_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.client_port}"


def start_etcd(layout: Layout, processes: Processes, again: Etcd | None = None) -> Etcd:
    """Start etcd, on the ports of `again` if given."""
    etcd = again or Etcd(*free_ports(2))
    peers = f"http://127.0.0.1:{etcd.peer_port}"
    processes.start(
        NAME,
        (
            program_path("etcd"),
            f"--data-dir={layout.root / 'etcd'}",
            f"--listen-client-urls={etcd.url}",
            f"--advertise-client-urls={etcd.url}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ),
    )

    def healthy() -> bool:
        processes.check_running(NAME)
        try:
            with urllib.request.urlopen(f"{etcd.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    wait_for("etcd healthy", healthy, READY_SECONDS, explain=lambda: processes.log_end(NAME))
    return etcd
