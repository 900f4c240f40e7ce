"""`modelswarm status`: shows the gateway's view of models, servers and sessions."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from modelswarm.cli.json_output.status import WATCH_SECONDS, fetch_status
from modelswarm.cli.options.target import AdminTarget
from modelswarm.cli.screens.sessions import session_table
from modelswarm.cli.terminal.names import common_beginning, count_of
from modelswarm.cli.terminal.server_cells import name_cell, name_column, pages_cell
from modelswarm.cli.terminal.states import server_state, state_cell
from modelswarm.cli.terminal.tables import Column, FittedTable, can_redraw, make_console
from modelswarm.client.message_fields import session_name
from modelswarm.client.swarm import SwarmClient
from modelswarm.local.run_folder import gateway_process
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2

MAX_SHOWN_SESSIONS = 20


def show_status(target: AdminTarget, session: str | None, watch: bool) -> None:
    """Print the status of the gateway at `target`, of one session or of all; with `watch` until Ctrl-C."""
    with SwarmClient(target.address) as client:

        def draw() -> RenderableType:
            return render_status(fetch_status(client, session), target)

        if watch:
            _watch(draw)
        else:
            make_console().print(draw())


def render_status(snapshot: api_pb2.Snapshot, target: AdminTarget | None = None) -> RenderableType:
    """Draw models, and the gateways of `target` if there are several, as lines, then servers and sessions as tables."""
    parts: list[RenderableType] = [_model_line(model) for model in snapshot.models]
    if not parts:
        parts.append(Text("no model yet: the gateway has no link to a server"))
    parts.extend(_gateway_lines(target))
    parts.append(Text(""))
    parts.append(_server_table(snapshot))
    parts.extend(_unlinked_lines(snapshot))
    if snapshot.sessions:
        parts.append(_session_table(snapshot))
        parts.extend(_held_lines(snapshot))
    return Group(*parts)


def _watch(draw: Callable[[], RenderableType]) -> None:
    out = make_console()
    if not can_redraw(out):
        while True:
            out.print(draw())
            time.sleep(WATCH_SECONDS)
    with Live(draw(), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_SECONDS)
            live.update(draw(), refresh=True)


def _gateway_lines(target: AdminTarget | None) -> list[Text]:
    """Return a line for each gateway if there are several: sessions are those of the one that was asked."""
    if target is None or target.run is None or not target.run.other_gateways:
        return []
    lines = []
    for gateway in target.run.gateways:
        process = gateway_process(target.run.name, gateway.name)
        state = f"ready (pid {process.pid})" if process else "not ready"
        asked = ", asked" if gateway.name == target.gateway else ""
        lines.append(Text(f"{gateway.name}: http://{gateway.http}, {state}{asked}"))
    return lines


def _model_line(model: api_pb2.ModelState) -> Text:
    line = Text(f"{model.model}: ")
    if not model.ready:
        return line.append("not ready", style="red").append(f", {model.reason}")
    line.append("ready", style="green").append(f", {count_of(model.n_blocks, 'block')}")
    if model.chat_problem:
        line.append("; chats are refused: ").append(" ".join(model.chat_problem.split()))
    return line


def _unlinked_lines(snapshot: api_pb2.Snapshot) -> list[Text]:
    """Return a line for each server that cannot be used, with the reason."""
    return [
        Text(f"cannot link to {name_of(each.peer)}: {each.reason}")
        for each in snapshot.unlinked
        if each.reason
    ]


def _server_table(snapshot: api_pb2.Snapshot) -> RenderableType:
    servers = sorted(snapshot.servers, key=lambda one: (one.first, one.last, one.peer))
    beginning = common_beginning([name_of(server.peer) for server in servers])
    columns = (
        name_column("server", beginning),
        Column("blocks"),
        Column("state"),
        Column("score", rank=2, right=True),
        Column("sessions", right=True),
        Column("free pages", rank=4, short_title="free", right=True),
        Column("step", rank=3, right=True),
        Column("address", rank=1),
    )
    rows = [
        (
            name_cell(name_of(server.peer), beginning),
            f"{server.first}:{server.last}",
            state_cell(server_state(server)),
            f"{server.score:.2f}",
            str(server.sessions),
            pages_cell(server),
            f"{server.step_ms:.1f} ms",
            server.target,
        )
        for server in servers
    ]
    return FittedTable("Servers", columns, rows)


def _session_table(snapshot: api_pb2.Snapshot) -> RenderableType:
    hidden = len(snapshot.sessions) - MAX_SHOWN_SESSIONS
    title = f"Sessions ({hidden} more not shown)" if hidden > 0 else "Sessions"
    servers = [name_of(server.peer) for server in snapshot.servers]
    return session_table(title, snapshot.sessions[:MAX_SHOWN_SESSIONS], servers)


def _held_lines(snapshot: api_pb2.Snapshot) -> list[RenderableType]:
    """Return a line for each session that is held, with the reason."""
    return [
        Text(f"{session_name(session.id)} is held: {session.hold_reason}")
        for session in snapshot.sessions[:MAX_SHOWN_SESSIONS]
        if session.hold_reason
    ]
