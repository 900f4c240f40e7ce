"""Mounts below a folder: containers' root file systems, pods' volumes and network namespaces. Used by `down`."""

from __future__ import annotations

import subprocess
from pathlib import Path


def mounts_below(folder: Path) -> list[Path]:
    """The innermost first."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        where = Path(line.split()[1].encode().decode("unicode_escape"))
        if where.is_relative_to(folder):
            found.append(where)
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def unmount_below(folder: Path) -> int:
    """How many were unmounted. Lazily: what a dying process still holds goes with it."""
    mounts = mounts_below(folder)
    for each in mounts:
        subprocess.run(("umount", "--lazy", str(each)), check=True)
    return len(mounts)
