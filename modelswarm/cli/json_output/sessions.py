"""The JSON of `sessions`: the sessions of gateways, and one session as its gateway shows it to clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from modelswarm.cli.options.target import AdminTarget
from modelswarm.client.message_fields import message_fields
from modelswarm.client.swarm import SwarmClient
from modelswarm.protocol.wire import api_pb2

if TYPE_CHECKING:
    from modelswarm.client.api.answers import SessionState


def fetch_snapshots(target: AdminTarget) -> list[tuple[str | None, api_pb2.Snapshot]]:
    """Return the view of each gateway of a swarm on this machine, or of the only one, with its name.

    Several gateways that run elsewhere are not known: only the one that is asked counts.
    """
    known = target.run.gateways if target.run else ()
    gateways = [(gateway.name, gateway.admin) for gateway in known]
    if len(gateways) < 2:
        return [(None, _fetch(target.address))]
    return [(name, _fetch(address)) for name, address in gateways]


def list_fields(snapshots: Sequence[tuple[str | None, api_pb2.Snapshot]]) -> dict[str, Any]:
    """Return the object of `sessions list --json`."""
    return {
        "sessions": [
            {"gateway": gateway, **message_fields(session)}
            for gateway, snapshot in snapshots
            for session in snapshot.sessions
        ]
    }


def session_fields(session: SessionState) -> dict[str, Any]:
    """Return the object of `sessions show --json` and `sessions fork --json`."""
    return asdict(session)


def _fetch(address: str) -> api_pb2.Snapshot:
    with SwarmClient(address) as client:
        return client.fetch_snapshot()
