"""The file by which gateways on this machine find a server that serves.

Written by `node.py` when everything is ready, removed when it stops; whoever kills a server cleans up
after it. Appears and changes atomically.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    peer: str
    target: str
    model: str
    revision: str
    first: int
    last: int
    n_blocks: int
    metrics: str
    pid: int


def announce(folder: Path, member: Member) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{member.name}.{member.pid}.tmp"
    partial.write_text(json.dumps(asdict(member)), encoding="utf-8")
    partial.replace(folder / f"{member.name}.json")


def withdraw(folder: Path, name: str) -> None:
    """Only our own file: a successor may have written its own already."""
    path = folder / f"{name}.json"
    try:
        if json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid():
            path.unlink(missing_ok=True)
    except (OSError, ValueError, KeyError):
        return  # gone, or not ours
