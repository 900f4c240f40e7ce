"""A small file by which a running process is found by others on this machine: it appears whole, and goes with it.

Written and removed by server, gateway and operator; `members` reads them. Whoever kills a process cleans up after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def announce(path: Path, said: Mapping[str, str | int]) -> None:
    """With our pid, so that `withdraw` knows it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps({**said, "pid": os.getpid()}), encoding="utf-8")
    partial.replace(path)


def withdraw(path: Path) -> None:
    """Only our own: a successor may have written its own already."""
    try:
        if json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid():
            path.unlink(missing_ok=True)
    except (OSError, ValueError, KeyError):
        return  # gone, or not ours
