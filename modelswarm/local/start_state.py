"""The state of a starting swarm: of servers from their start files, of the gateway from its snapshot.

Used by `LocalSwarm`, the screens of `up`, and `status` before the swarm is ready. The functions about the gateway are
pure. Starts and waits for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelswarm.local.run_folder import StartInfo, runs_folder
from modelswarm.process.start_progress import (
    BYTE_PHASES,
    StartPhase,
    StartProgress,
    read_start_file,
)
from modelswarm.protocol.identity import name_of

if TYPE_CHECKING:
    from modelswarm.protocol.wire import api_pb2

IMPORTING = StartProgress(StartPhase.IMPORTING)
READY = StartProgress(StartPhase.READY)
_LINKED = "linked"  # health of a server with a link and without a fault


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """A process of a starting swarm."""

    name: str
    blocks: str  # of a server, such as 0:4; empty: a gateway
    pid: int  # 0: not known
    progress: StartProgress


def read_server_progress(start_file: Path, pid: int) -> StartProgress:
    """Return the progress of the server process `pid`: it imports until it reports."""
    found = read_start_file(start_file)
    return IMPORTING if found is None or found.pid != pid else found.progress


def gateway_progress(
    snapshot: api_pb2.Snapshot | None, servers: Collection[str], silence: str = ""
) -> StartProgress:
    """Return the progress of a gateway whose ports are open, towards links to all `servers` and a ready model.

    `snapshot`: its view of the swarm; None while it does not answer, and `silence` is the reason.
    """
    if snapshot is None:
        return StartProgress(StartPhase.LINKING, 0, len(servers), silence)
    health = {name_of(server.peer): server.health for server in snapshot.servers}
    linked = [name for name in servers if health.get(name) == _LINKED]
    if len(linked) < len(servers):
        reason = "; ".join(_link_faults(snapshot, health))
        return StartProgress(StartPhase.LINKING, len(linked), len(servers), reason)
    waiting = [model for model in snapshot.models if not model.ready]
    if snapshot.models and len(waiting) < len(snapshot.models):
        return READY
    if not waiting:
        return StartProgress(StartPhase.TOKENIZER, reason="the gateway knows no model yet")
    return StartProgress(waiting[0].phase, reason=f"{waiting[0].model}: {waiting[0].reason}")


def _link_faults(snapshot: api_pb2.Snapshot, health: dict[str, str]) -> list[str]:
    """Return a sentence for each server that runs and cannot be used. One that is not there yet has none."""
    unlinked = ((name_of(each.peer), each.reason) for each in snapshot.unlinked)
    failed = [f"cannot link to {name}: {reason}" for name, reason in unlinked if reason]
    return failed + [f"{name} is {word}" for name, word in health.items() if word != _LINKED]


def describe_amount(progress: StartProgress) -> str:
    """Return how much of a phase is done: `3.1 GiB of 8 GiB`, `2 of 4`; empty if that is not known."""
    if not progress.total:
        return ""
    if progress.phase in BYTE_PHASES:
        from modelswarm.placement.quantity import human_bytes  # imports pydantic; `status` is quick

        return f"{human_bytes(progress.done)} of {human_bytes(progress.total)}"
    return f"{progress.done} of {progress.total}"


def describe_progress(progress: StartProgress) -> str:
    """Return phase, amount and reason in one line."""
    amount = describe_amount(progress)
    parts = (str(progress.phase), f" ({amount})" if amount else "")
    reason = " ".join(progress.reason.split())
    return "".join((*parts, f": {reason}" if reason else ""))


def read_server_starts(start: StartInfo, parent: Path | None = None) -> list[ProcessStart]:
    """Return the servers of a swarm of this machine, from the files of its folder."""
    folder = (parent or runs_folder()) / start.name
    found = []
    for name, blocks in start.servers.items():
        ready_pid = _read_pid(folder / "members" / f"{name}.json")
        written = read_start_file(folder / "starts" / f"{name}.json")
        if ready_pid:
            found.append(ProcessStart(name, blocks, ready_pid, READY))
        elif written is None:
            found.append(ProcessStart(name, blocks, 0, IMPORTING))
        else:
            found.append(ProcessStart(name, blocks, written.pid, written.progress))
    return found


def read_gateway_file(swarm: str, gateway: str, parent: Path | None = None) -> tuple[int, str]:
    """Return the pid and the admin address of a gateway; (0, "") until its ports are open."""
    record = _read_record((parent or runs_folder()) / swarm / f"{gateway}.json")
    pid, admin = record.get("pid"), record.get("admin")
    return (pid, admin) if isinstance(pid, int) and isinstance(admin, str) else (0, "")


def _read_pid(run_file: Path) -> int:
    pid = _read_record(run_file).get("pid")
    return pid if isinstance(pid, int) else 0


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
