"""The machine of a node: a process whose mount namespace is the node's own.

Used by `Node`. The mounts of containerd and the kubelet exist only in there and go with it, as at a reboot. Folders
that no flag can move are replaced by the node's own. So a container runtime or a kubelet of the host is never touched.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.devcluster.network.namespace_holder import hold_namespaces
from tools.devcluster.network.network import claimed_links, lock_claims, run_command
from tools.devcluster.nodes.limits import restore_limits
from tools.devcluster.processes import Processes

FIXED = (
    Path("/var/lib/kubelet"),  # device-plugins/kubelet.sock
    Path("/var/lib/cni"),  # results of CNI programs
    Path("/var/log/containers"),  # links to logs
    Path("/run/containerd"),
)
SPARE_BYTES = 8 << 30  # free memory from which on disks are kept in memory


class Machine:
    """A machine that is booted and switched off."""

    def __init__(self, name: str, folder: Path, processes: Processes) -> None:
        self._process = f"machine-{name}"
        self._folder = folder
        self._processes = processes

    def add_disk(self, network: int, place: Path) -> None:
        """Keep images and containers in memory when there is enough: to unpack and delete gigabytes is slow on a disk.

        The disk outlives a reboot, not the cluster. Every boot copies the mount namespace of the pid `network`.
        """
        place.mkdir(parents=True, exist_ok=True)
        if _free_memory() > SPARE_BYTES:
            mount = ("mount", "-t", "tmpfs", "-o", "mode=0700", "modelswarm-disk", str(place))
            run_command("nsenter", f"--target={network}", "--mount", *mount)

    def boot(self, network: int) -> int:
        """Start the machine on the network of the pid `network`. Return the pid whose namespaces are the node's."""
        pid = hold_namespaces(self._processes, self._process, inside=network)
        for place in FIXED:
            own = self._folder / "fixed" / place.relative_to("/")
            own.mkdir(parents=True, exist_ok=True)
            place.mkdir(parents=True, exist_ok=True)
            run_command(
                "nsenter", f"--target={pid}", "--mount", "mount", "--bind", str(own), str(place)
            )
        return pid

    def switch_off(self) -> None:
        self._processes.kill(self._process)
        shutil.rmtree(self._folder / "fixed", ignore_errors=True)


def clean_host() -> None:
    """Remove the empty folders that `boot` made and restore the raised limits, if this was the last cluster.

    A folder that is in use is not empty. While another cluster runs nothing is removed: a removed folder takes the
    mounts on it away in every namespace.
    """
    with lock_claims():
        if claimed_links():
            return
        restore_limits()
        for place in FIXED:
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
