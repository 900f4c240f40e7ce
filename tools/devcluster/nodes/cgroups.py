"""Control groups of one node: the folder below which its kubelet puts pods, in every mounted hierarchy.

Used by `Node`. All processes of a node's containers are below it, so it also lists them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tools.devcluster.waiting import wait_for

MOUNT = Path("/sys/fs/cgroup")
COPIED = (
    "cpuset.cpus",
    "cpuset.mems",
)  # empty in a new group of version 1: nothing could run there
GONE_SECONDS = 20.0


def hierarchies() -> list[Path]:
    """Return one folder per controller in version 1, the mount itself in version 2."""
    if (MOUNT / "cgroup.controllers").exists():
        return [MOUNT]
    return [folder for folder in MOUNT.iterdir() if folder.is_dir() and not folder.is_symlink()]


def make_group(name: str) -> None:
    for hierarchy in hierarchies():
        group = hierarchy / name
        group.mkdir(parents=True, exist_ok=True)
        for file in COPIED:
            if (hierarchy / file).exists():
                (group / file).write_text((hierarchy / file).read_text())


def group_pids(name: str) -> set[int]:
    found: set[int] = set()
    for hierarchy in hierarchies():
        for folder, _, files in os.walk(hierarchy / name):
            if "cgroup.procs" in files:
                found |= _read_pids(Path(folder) / "cgroup.procs")
    return found


def kill_group(name: str) -> int:
    """Kill all processes below a group, also those started meanwhile. Return how many there were."""
    killed: set[int] = set()

    def none_left() -> bool:
        alive = group_pids(name)
        for pid in alive:
            _kill(pid)
        killed.update(alive)
        return not alive

    wait_for(f"the processes of {name} to end", none_left, GONE_SECONDS, every=0.02)
    return len(killed)


def remove_group(name: str) -> None:
    for hierarchy in hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            Path(folder).rmdir()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has just ended


def _read_pids(file: Path) -> set[int]:
    try:
        return {int(line) for line in file.read_text().split()}
    except (FileNotFoundError, OSError):
        return set()  # the group was removed while it was read
