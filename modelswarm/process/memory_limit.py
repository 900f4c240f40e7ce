"""Memory of this process as Linux counts it: the limit of its control group and its resident size.

Used by servers at their start. Reads `/proc` and `/sys/fs/cgroup` below a root folder; on other systems there is no
limit and no size. Decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_UNLIMITED = 1 << 60
"""Version 1 writes a number near 2^63 for "no limit"."""
_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)


def read_memory_limit(root: Path = ROOT) -> int | None:
    """Return the smallest memory limit of this process's control groups, in bytes; None without a limit.

    Reads version 2 (`memory.max`) and version 1 (`memory.limit_in_bytes`), of the group and of those above it. In a
    container the group's own folder may be the root of the mount, so a path that does not exist counts as the root.
    """
    limits = [limit for file in _limit_files(root) if (limit := _read_limit(file)) is not None]
    return min(limits, default=None)


def read_resident_bytes(root: Path = ROOT) -> int | None:
    """Return the resident memory of this process in bytes; None where it cannot be read."""
    text = _read(root / "proc/self/status")
    found = None if text is None else _RESIDENT.search(text)
    return None if found is None else int(found[1]) << 10


def _limit_files(root: Path) -> Iterator[Path]:
    groups = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _with_parents(groups, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _with_parents(groups / "memory", path, "memory.limit_in_bytes")


def _with_parents(mount: Path, path: str, file: str) -> Iterator[Path]:
    """Return the file in the group and in every group above it, up to the root of the mount."""
    group = PurePosixPath(path.lstrip("/"))
    for folder in (group, *group.parents):
        yield mount / folder / file


def _read_limit(file: Path) -> int | None:
    text = (_read(file) or "").strip()
    if not text.isdigit() or int(text) >= _UNLIMITED:  # version 2 writes `max`
        return None
    return int(text)


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None
