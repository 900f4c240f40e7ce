"""A process that does nothing but keep namespaces of its own alive; others enter them by its pid.

Used by `network` and `machine`. When nobody is left inside, the kernel takes the namespaces away with all that is in
them: links, routes, nft tables, mounts.
"""

from __future__ import annotations

import os
from pathlib import Path

from tools.devcluster.processes import Processes
from tools.devcluster.waiting import wait_for

START_SECONDS = 10.0


def hold_namespaces(processes: Processes, name: str, *kinds: str, inside: int | None = None) -> int:
    """The pid, when it is inside: always a mount namespace of its own, and those of `kinds`."""
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
    """`unshare` became `sleep`: propagation is set as well."""
    namespace = os.readlink(f"/proc/{pid}/ns/mnt")
    return namespace != ours and Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
