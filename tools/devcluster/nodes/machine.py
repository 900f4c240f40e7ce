"""What stands for a node's machine: a process whose mount namespace is the node's own.

Used by `Node`. Everything that containerd and the kubelet mount is seen in there only and goes with it, as at a reboot.
Folders whose place in the host no flag of theirs can move are replaced by the node's own, so that a container runtime
or a kubelet of the host's is never touched.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.devcluster.network.namespace_holder import hold_namespaces
from tools.devcluster.network.network import claimed_links, claiming, run
from tools.devcluster.nodes.limits import restore_limits
from tools.devcluster.processes import Processes

FIXED = (
    Path("/var/lib/kubelet"),  # device-plugins/kubelet.sock
    Path("/var/lib/cni"),  # results of CNI programs
    Path("/var/log/containers"),  # links to logs
    Path("/run/containerd"),
)
SPARE_BYTES = 8 << 30  # of memory, for disks to be held there


class Machine:
    """Booted and switched off; `pid` is what others enter."""

    def __init__(self, name: str, folder: Path, processes: Processes) -> None:
        self._process = f"machine-{name}"
        self._folder = folder
        self._processes = processes

    def add_disk(self, network: int, place: Path) -> None:
        """Images and containers lie in memory when there is enough: unpacking and deleting gigabytes is slow on a disk.

        It outlives a reboot, not the cluster. `network`: the pid whose mount namespace every boot copies.
        """
        place.mkdir(parents=True, exist_ok=True)
        if _free_memory() > SPARE_BYTES:
            mount = ("mount", "-t", "tmpfs", "-o", "mode=0700", "modelswarm-disk", str(place))
            run("nsenter", f"--target={network}", "--mount", *mount)

    def boot(self, network: int) -> int:
        """The pid whose namespaces are the node's. `network`: the pid whose network it is on."""
        pid = hold_namespaces(self._processes, self._process, inside=network)
        for place in FIXED:
            own = self._folder / "fixed" / place.relative_to("/")
            own.mkdir(parents=True, exist_ok=True)
            place.mkdir(parents=True, exist_ok=True)
            run("nsenter", f"--target={pid}", "--mount", "mount", "--bind", str(own), str(place))
        return pid

    def switch_off(self) -> None:
        self._processes.kill(self._process)
        shutil.rmtree(self._folder / "fixed", ignore_errors=True)


def leave_host() -> None:
    """When the last cluster goes: the empty places that `boot` made, and the limits that were raised.

    What somebody uses is not empty. Not while another cluster is there: a folder that is removed takes the mounts on
    it away in every namespace.
    """
    with claiming():
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
