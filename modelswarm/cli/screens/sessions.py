"""Sessions as a table, and one session as lines. Used by `sessions` and by `status`."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import click
from rich.console import RenderableType

from modelswarm.cli.terminal.names import common_beginning
from modelswarm.cli.terminal.states import session_state, state_cell
from modelswarm.cli.terminal.tables import Cell, Column, FittedTable, make_console
from modelswarm.client.message_fields import session_name
from modelswarm.client.swarm import format_route
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2

if TYPE_CHECKING:
    from modelswarm.client.api.answers import SessionState


def session_table(
    title: str, sessions: Sequence[api_pb2.Session], servers: Collection[str]
) -> RenderableType:
    """Draw sessions. `servers`: names of all servers, whose common beginning is left out of short routes."""
    beginning = common_beginning(servers)
    columns = (
        Column("session"),
        Column("state"),
        Column("tokens", right=True),
        Column("route", rank=1),
    )
    rows = [
        (
            session_name(session.id),
            state_cell(session_state(session)),
            str(session.length),
            _route_cell(session, beginning),
        )
        for session in sessions
    ]
    return FittedTable(title, columns, rows)


def print_session_tables(snapshots: Sequence[tuple[str | None, api_pb2.Snapshot]]) -> None:
    """Print the sessions of each gateway. The name of a gateway is None if it is the only one."""
    out = make_console()
    for gateway, snapshot in snapshots:
        of_gateway = f" of {gateway}" if gateway else ""
        if not snapshot.sessions:
            out.print(f"no sessions{of_gateway}")
            continue
        names = [name_of(server.peer) for server in snapshot.servers]
        out.print(session_table(f"Sessions{of_gateway}", snapshot.sessions, names))


def print_session(session: SessionState) -> None:
    """Print one session as lines."""
    room = "" if session.max_length is None else f" of {session.max_length}"
    lines = [
        f"{session.id}: {session.state}, {session.model}",
        f"  {session.position}{room} positions, {session.reroutes} reroutes",
    ]
    if session.route:
        hops = (f"{hop.server} [{hop.first}:{hop.last}]" for hop in session.route)
        lines.append(f"  route: {' -> '.join(hops)}")
    if session.expires_at is not None:
        left = max(0, round(session.expires_at - time.time()))
        lines.append(f"  dropped in {left} s without a turn")
    for line in lines:
        click.echo(line)


def _route_cell(session: api_pb2.Session, beginning: str) -> Cell:
    names = (name_of(hop.peer).removeprefix(beginning) for hop in session.route)
    return Cell(format_route(tuple(session.route)), short=" -> ".join(names))
