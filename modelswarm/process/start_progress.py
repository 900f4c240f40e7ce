"""Progress of the start of a process: its phase, how much of the phase is done, and what prevents its end.

Servers write it into a start file (`start_reporter.py`) and answer /ready with it; gateways send it in their Snapshot.
Read by `up`, `status` and the operator. Imports little, because `status` imports it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias


class StartPhase(enum.StrEnum):
    """Phases of a start, in the words of all screens. Bytes are counted while fetching and reading."""

    IMPORTING = "importing"
    # of a server
    FETCHING = "fetching"
    READING = "reading weights"
    CHECKING = "checking"
    # of a gateway
    LINKING = "linking servers"
    TOKENIZER = "tokenizer"
    TEMPLATE = "chat template"
    READY = "ready"


BYTE_PHASES = (StartPhase.FETCHING, StartPhase.READING)
"""Phases whose `done` and `total` are bytes. Those of LINKING are servers; all others have none."""


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The progress of one process's start."""

    phase: str  # a StartPhase, or that of another version
    done: int = 0
    total: int = 0  # 0: not known
    reason: str = ""  # what is waited for, or what prevents readiness; one sentence

    @property
    def is_ready(self) -> bool:
        return self.phase == StartPhase.READY

    def response_body(self) -> dict[str, str | int]:
        """Return the body of /ready while the process starts. The operator reads it."""
        return {"status": "starting", **self.fields()}

    def fields(self) -> dict[str, str | int]:
        return {
            "phase": str(self.phase),
            "done": self.done,
            "total": self.total,
            "reason": self.reason,
        }


ReportProgress: TypeAlias = Callable[[StartPhase, int, int], None]
"""Reports a phase, and how much of it is done: (phase, done, total)."""


def ignore_progress(phase: StartPhase, done: int = 0, total: int = 0) -> None:
    """Report nothing: for callers without a reader of the progress."""


@dataclass(frozen=True, slots=True)
class StartFile:
    """The content of a start file: the progress of the process `pid`."""

    progress: StartProgress
    pid: int


def read_start_file(path: Path) -> StartFile | None:
    """Return the content of a start file; None if there is none, or one that another version wrote."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return _parse_record(record) if isinstance(record, dict) else None


def _parse_record(record: Mapping[str, object]) -> StartFile | None:
    phase, reason, pid = record.get("phase"), record.get("reason"), record.get("pid")
    done, total = record.get("done"), record.get("total")
    if not (isinstance(phase, str) and isinstance(reason, str) and isinstance(pid, int)):
        return None
    if not (isinstance(done, int) and isinstance(total, int)):
        return None
    return StartFile(StartProgress(phase, done, total, reason), pid)
