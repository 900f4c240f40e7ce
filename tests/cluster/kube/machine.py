"""What stands for a node's machine: a process whose mount namespace is the node's own.

Used by `Node`. Everything that containerd and the kubelet mount is seen in there only and goes with it, as at a reboot.
Folders whose place in the host no flag of theirs can move are replaced by the node's own, so that a container runtime
or a kubelet of the host's is never touched.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cluster.kube.network import run
from cluster.kube.processes import Processes
from cluster.kube.waiting import wait_for

FIXED = (
    Path("/var/lib/kubelet"),  # device-plugins/kubelet.sock
    Path("/var/lib/cni"),  # results of CNI programs
    Path("/var/log/containers"),  # links to logs
    Path("/run/containerd"),
)
START_SECONDS = 10.0


class Machine:
    """Booted and switched off; `pid` is what others enter."""

    def __init__(self, name: str, folder: Path, processes: Processes) -> None:
        self._process = f"machine-{name}"
        self._folder = folder
        self._processes = processes

    def boot(self, network: int) -> int:
        """The pid whose namespaces are the node's. `network`: the pid whose network it is on."""
        ours = os.readlink("/proc/self/ns/mnt")
        command = ("unshare", "--mount", "--propagation", "private", "sleep", "infinity")
        pid = self._processes.start(self._process, command, inside=network)
        wait_for(
            "a mount namespace",
            lambda: _entered(pid, ours),
            START_SECONDS,
            every=0.01,
            explain=lambda: self._processes.log_end(self._process),
        )
        for place in FIXED:
            own = self._folder / "fixed" / place.relative_to("/")
            own.mkdir(parents=True, exist_ok=True)
            place.mkdir(parents=True, exist_ok=True)
            run("nsenter", f"--target={pid}", "--mount", "mount", "--bind", str(own), str(place))
        return pid

    def switch_off(self) -> None:
        self._processes.kill(self._process)
        shutil.rmtree(self._folder / "fixed", ignore_errors=True)


def remove_fixed_folders() -> None:
    """The empty places that `boot` made; what somebody uses is not empty."""
    for place in FIXED:
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def _entered(pid: int, ours: str) -> bool:
    """`unshare` became `sleep`: propagation is set as well."""
    namespace = os.readlink(f"/proc/{pid}/ns/mnt")
    return namespace != ours and Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
