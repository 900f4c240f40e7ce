"""The file by which others on this machine find a running gateway. Written and removed by `main.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def announce(path: Path, said: Mapping[str, str | int]) -> None:
    """Appears at once and whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(said), encoding="utf-8")
    partial.replace(path)


def withdraw(path: Path) -> None:
    """Only our own: a successor may have written its own already."""
    try:
        if json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid():
            path.unlink(missing_ok=True)
    except (OSError, ValueError, KeyError):
        return  # gone, or not ours
