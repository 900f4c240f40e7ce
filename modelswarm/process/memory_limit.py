"""Memory of this process as Linux counts it: the limit of its control group and its resident size.

Used by servers at their start. On other systems there is no limit and no size. Decides nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

from modelswarm.process.control_groups import ROOT as ROOT
from modelswarm.process.control_groups import group_files, read_text

_UNLIMITED = 1 << 60
"""Version 1 writes a number near 2^63 for "no limit"."""
_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)


def read_memory_limit(root: Path = ROOT) -> int | None:
    """Return the smallest memory limit of this process's control groups, in bytes; None without a limit."""
    files = group_files(root, "memory", "memory.max", "memory.limit_in_bytes")
    limits = [limit for file in files if (limit := _read_limit(file)) is not None]
    return min(limits, default=None)


def read_resident_bytes(root: Path = ROOT) -> int | None:
    """Return the resident memory of this process in bytes; None where it cannot be read."""
    text = read_text(root / "proc/self/status")
    found = None if text is None else _RESIDENT.search(text)
    return None if found is None else int(found[1]) << 10


def _read_limit(file: Path) -> int | None:
    text = (read_text(file) or "").strip()
    if not text.isdigit() or int(text) >= _UNLIMITED:  # version 2 writes `max`
        return None
    return int(text)
