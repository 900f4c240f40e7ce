"""A process that only keeps namespaces in existence; other processes enter them by its pid.

Used by `network` and `machine`. When no process is left inside, the kernel removes the namespaces with all that is in
them: links, routes, nft tables, mounts.
"""

from __future__ import annotations

import os
from pathlib import Path

from tools.devcluster.processes import Processes
from tools.devcluster.waiting import wait_for

START_SECONDS = 60.0


def hold_namespaces(processes: Processes, name: str, *kinds: str, inside: int | None = None) -> int:
    """Start a process with its own mount namespace and those of `kinds`. Return its pid when it is inside."""
    flags = [f"--{kind}" for kind in kinds]
    command = ("unshare", "--mount", "--propagation", "private", *flags, "sleep", "infinity")
    ours = os.readlink("/proc/self/ns/mnt")
    pid = processes.start(name, command, inside=inside)
    wait_for(
        f"the namespaces of {name}",
        lambda: _entered(pid, ours),
        START_SECONDS,
        every=0.01,
        explain=lambda: processes.log_end(name),
    )
    return pid


def _entered(pid: int, ours: str) -> bool:
    """Say whether `unshare` has become `sleep`: then propagation is set as well."""
    namespace = os.readlink(f"/proc/{pid}/ns/mnt")
    return namespace != ours and Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
