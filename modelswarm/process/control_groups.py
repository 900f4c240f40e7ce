"""Files of this process's control groups, of version 1 and version 2.

Used by `memory_limit.py` and `cpu_limit.py`. Reads `/proc/self/cgroup` below a root folder; other systems have no
groups. Knows no limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def group_files(root: Path, controller: str, version_2: str, version_1: str) -> Iterator[Path]:
    """Return a file of the group and of every group above it, for each version that has the controller.

    In a container the group's own folder may be the root of the mount, so a path that does not exist counts as the
    root.
    """
    groups = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _with_parents(groups, path, version_2)
        elif controller in controllers.split(","):
            yield from _with_parents(groups / controller, path, version_1)


def read_text(file: Path) -> str | None:
    """Return the text of a file; None if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None


def _with_parents(mount: Path, path: str, file: str) -> Iterator[Path]:
    """Return the file in the group and in every group above it, up to the root of the mount."""
    group = PurePosixPath(path.lstrip("/"))
    for folder in (group, *group.parents):
        yield mount / folder / file
