"""The JSON of `status` while a swarm starts: from the files of its folder, and from its gateway if it answers."""

from __future__ import annotations

import time
from typing import Any

from modelswarm.cli.json_output.printing import print_json
from modelswarm.client.message_fields import message_fields
from modelswarm.client.swarm import SwarmClient, SwarmClientError
from modelswarm.local.run_folder import StartInfo, find_starting
from modelswarm.local.start_state import (
    IMPORTING,
    ProcessStart,
    gateway_progress,
    read_gateway_file,
    read_server_starts,
)
from modelswarm.process.start_progress import StartProgress
from modelswarm.protocol.wire import api_pb2

GATEWAY_SECONDS = 1.0  # for the answer of a gateway that starts
WATCH_SECONDS = 1.0


def print_start(start: StartInfo, watch: bool) -> None:
    """Print the processes of a starting swarm as one line of JSON; with `watch` one a second, until it is ready."""
    print_json(start_fields(start))
    while watch:
        time.sleep(WATCH_SECONDS)
        if find_starting(start.name) is None:
            return
        print_json(start_fields(start))


def start_fields(start: StartInfo) -> dict[str, Any]:
    """Return the fields of `status`; those that only a ready swarm has are None or empty."""
    processes, snapshot = read_processes(start)
    shown = message_fields(snapshot)
    for server in shown["servers"]:
        server |= dict.fromkeys(("pid", "metrics", "ready_seconds"))
    return {
        "swarm": start.name,
        "gateway": None,
        "gateways": [],
        "starting": [process_fields(process) for process in processes],
        **shown,
    }


def read_processes(start: StartInfo) -> tuple[list[ProcessStart], api_pb2.Snapshot]:
    """Return servers and gateways, and the view of the last gateway that answers; it is empty if none does."""
    found, view = read_server_starts(start), api_pb2.Snapshot()
    for name in start.gateways:
        pid, target = read_gateway_file(start.name, name)
        snapshot, silence = _fetch_snapshot(target) if target else (None, "")
        progress = gateway_progress(snapshot, start.servers, silence) if target else IMPORTING
        found.append(ProcessStart(name, "", pid, progress))
        view = snapshot or view
    return found, view


def _fetch_snapshot(target: str) -> tuple[api_pb2.Snapshot | None, str]:
    """Return the view of a gateway, or None and the reason."""
    with SwarmClient(target) as client:
        try:
            return client.fetch_snapshot(GATEWAY_SECONDS), ""
        except SwarmClientError as error:
            return None, str(error)


def process_fields(process: ProcessStart) -> dict[str, Any]:
    """Return the fields of a starting process; what is not known is None."""
    return {
        "process": process.name,
        "blocks": process.blocks or None,
        "pid": process.pid or None,
        **progress_fields(process.progress),
    }


def progress_fields(progress: StartProgress) -> dict[str, Any]:
    """Return the fields of a progress; what is not known is None."""
    is_counted = progress.total > 0
    return {
        "phase": str(progress.phase),
        "done": progress.done if is_counted else None,
        "total": progress.total if is_counted else None,
        "reason": progress.reason or None,
    }
