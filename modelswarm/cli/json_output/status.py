"""The JSON of `status`: the gateway's snapshot, with what only this machine knows of its own processes.

Also used by the tables of `status`, for the choice of one session.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from modelswarm.cli.json_output.printing import print_json
from modelswarm.cli.options.target import AdminTarget
from modelswarm.client.message_fields import message_fields
from modelswarm.client.swarm import SwarmClient
from modelswarm.errors import ModelSwarmError
from modelswarm.local.run_folder import (
    GatewayAddresses,
    LocalProcess,
    RunInfo,
    gateway_process,
    server_processes,
)
from modelswarm.protocol.identity import session_wire_name
from modelswarm.protocol.wire import api_pb2

WATCH_SECONDS = 1.0


def print_status(target: AdminTarget, session: str | None, watch: bool) -> None:
    """Print the status as one line of JSON; with `watch` one line a second, until Ctrl-C."""
    with SwarmClient(target.address) as client:
        print_json(status_fields(fetch_status(client, session), target))
        while watch:
            time.sleep(WATCH_SECONDS)
            print_json(status_fields(fetch_status(client, session), target))


def fetch_status(client: SwarmClient, session: str | None) -> api_pb2.Snapshot:
    """Return the gateway's snapshot, with only the session of that `session_id` if one is given."""
    snapshot = client.fetch_snapshot()
    if session is None:
        return snapshot
    found = [one for one in snapshot.sessions if one.id == session_wire_name(one.model, session)]
    if not found:
        raise ModelSwarmError(f"this gateway has no session with session_id {session!r}")
    del snapshot.sessions[:]
    snapshot.sessions.extend(found)
    return snapshot


def status_fields(snapshot: api_pb2.Snapshot, target: AdminTarget) -> dict[str, Any]:
    """Return the snapshot's fields. What only this machine knows is None if the swarm runs elsewhere."""
    shown, run = message_fields(snapshot), target.run
    processes = server_processes(run.name) if run else {}
    for server in shown["servers"]:
        server |= _process_fields(processes.get(server["peer"]))
    return {
        "swarm": run.name if run else None,
        "gateway": target.gateway,
        "gateways": [_gateway_fields(run, gateway) for gateway in run.gateways] if run else [],
        "starting": [],  # see `json_output.start`
        **shown,
    }


def _gateway_fields(run: RunInfo, gateway: GatewayAddresses) -> dict[str, Any]:
    return _process_fields(gateway_process(run.name, gateway.name)) | asdict(gateway)


def _process_fields(process: LocalProcess | None) -> dict[str, Any]:
    return {
        "pid": process.pid if process else None,
        "metrics": process.metrics if process else None,
        "ready_seconds": round(process.ready_seconds, 1) if process else None,
    }
