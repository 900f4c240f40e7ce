"""CPUs that this process may use: its control groups' limit, and the CPUs on which it is scheduled.

Used for `--threads auto` by servers and by `modelswarm up`. A server with more threads than CPUs is throttled in the
middle of a step. Decides nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path

from modelswarm.process.control_groups import ROOT, group_files, read_text

_V1_QUOTA = "cpu.cfs_quota_us"
_V1_PERIOD = "cpu.cfs_period_us"


def usable_cpus(root: Path = ROOT) -> int:
    """Return the whole CPUs of the smallest limit, at least 1; without a limit the CPUs of this process.

    A cpuset counts: it limits the CPUs on which the process is scheduled.
    """
    scheduled = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = read_cpu_limit(root)
    cpus = scheduled or 1
    return cpus if limit is None else max(1, min(cpus, int(limit)))


def read_cpu_limit(root: Path = ROOT) -> float | None:
    """Return the smallest CPU limit of this process's control groups, in CPUs; None without a limit."""
    limits = [
        limit
        for file in group_files(root, "cpu", "cpu.max", _V1_QUOTA)
        if (limit := _read_limit(file)) is not None
    ]
    return min(limits, default=None)


def _read_limit(file: Path) -> float | None:
    """Return quota over period. Version 2 has both in one file, and `max` for no limit; version 1 has -1."""
    words = (read_text(file) or "").split()
    if file.name == _V1_QUOTA:
        words += (read_text(file.with_name(_V1_PERIOD)) or "").split()
    if len(words) != 2 or not all(word.isdigit() for word in words) or "0" in words:
        return None
    return int(words[0]) / int(words[1])
