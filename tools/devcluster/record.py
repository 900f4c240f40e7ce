"""The record of a cluster that outlives the process that started it: enough to remove the cluster.

Used by `RealCluster`, `down` and the command line.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.devcluster.layout import Layout
from tools.devcluster.processes import start_ticks


@dataclass(frozen=True, slots=True)
class Record:
    """Written before anything is started."""

    owner: int  # pid of the process that it must not outlive; 0: it stays
    owner_started: int
    octet: int  # -1: no network of its own
    nodes: int

    @property
    def orphaned(self) -> bool:
        return self.owner != 0 and start_ticks(self.owner) != self.owner_started


def write_record(layout: Layout, *, octet: int, nodes: int, ends_with_owner: bool) -> Record:
    owner = os.getpid() if ends_with_owner else 0
    record = Record(owner, start_ticks(owner) or 0 if ends_with_owner else 0, octet, nodes)
    half = layout.record.with_suffix(".half")
    half.write_text(json.dumps(asdict(record)))
    half.replace(layout.record)
    return record


def read_record(layout: Layout) -> Record | None:
    if not layout.record.exists():
        return None
    return Record(**json.loads(layout.record.read_text()))


def folders_with_records(parent: Path, prefix: str) -> list[Path]:
    return [folder for folder in parent.glob(f"{prefix}*") if (folder / "cluster.json").exists()]
