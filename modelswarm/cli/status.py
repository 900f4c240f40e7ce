"""`modelswarm status`: shows the gateway's view of models, servers and sessions."""

from __future__ import annotations

import json
import time

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from modelswarm.cli.options.target import grpc_target, grpc_target_options
from modelswarm.cli.terminal.tables import make_console, make_table
from modelswarm.client.swarm import SwarmClient, format_route
from modelswarm.placement.spans import format_blocks
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2

WATCH_SECONDS = 1.0
MAX_SHOWN_SESSIONS = 20


@click.command()
@grpc_target_options
@click.option("--watch", is_flag=True, help="Refresh once a second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def status(name: str | None, target: str | None, watch: bool, as_json: bool) -> None:
    """Show the servers, spans, health and sessions of a running swarm."""
    with SwarmClient(grpc_target(name, target)) as client:
        if as_json:
            snapshot = MessageToDict(client.fetch_snapshot(), preserving_proto_field_name=True)
            click.echo(json.dumps(snapshot))
        elif watch:
            _watch(client)
        else:
            make_console().print(render_status(client.fetch_snapshot()))


def render_status(snapshot: api_pb2.Snapshot) -> RenderableType:
    """Draw models as lines, then servers and sessions as tables."""
    parts: list[RenderableType] = [Text(_model_line(model)) for model in snapshot.models]
    if not parts:
        parts.append(Text("no model yet: the gateway has no link to a server"))
    parts.append(_server_table(snapshot))
    if snapshot.sessions:
        parts.append(_session_table(snapshot))
    return Group(*parts)


def _watch(client: SwarmClient) -> None:
    out = make_console()
    if not out.is_terminal:
        while True:
            out.print(render_status(client.fetch_snapshot()))
            time.sleep(WATCH_SECONDS)
    with Live(render_status(client.fetch_snapshot()), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_SECONDS)
            live.update(render_status(client.fetch_snapshot()), refresh=True)


def _model_line(model: api_pb2.ModelState) -> str:
    if model.ready:
        return f"{model.model}: ready, {model.n_blocks} blocks"
    missing = format_blocks(model.missing_blocks)
    why = f"no server for blocks {missing}" if missing else "the tokenizer is not loaded yet"
    return f"{model.model}: not ready, {why}"


def _server_table(snapshot: api_pb2.Snapshot) -> RenderableType:
    columns = ("server", "blocks", "health", "score", "sessions", "free pages", "step", "address")
    rows = [
        (
            name_of(server.peer),
            f"{server.first}:{server.last}",
            server.health,
            f"{server.score:.2f}",
            str(server.sessions),
            f"{server.free_pages} of {server.total_pages}",
            f"{server.step_ms:.1f} ms",
            server.target,
        )
        for server in sorted(snapshot.servers, key=lambda one: (one.first, one.last, one.peer))
    ]
    return make_table("Servers", columns, rows)


def _session_table(snapshot: api_pb2.Snapshot) -> RenderableType:
    rows = [
        (
            session.id.rsplit(":", 1)[-1],
            session.state,
            str(session.length),
            format_route(tuple(session.route)),
        )
        for session in snapshot.sessions[:MAX_SHOWN_SESSIONS]
    ]
    hidden = len(snapshot.sessions) - len(rows)
    title = f"Sessions ({hidden} more not shown)" if hidden > 0 else "Sessions"
    return make_table(title, ("session", "state", "tokens", "route"), rows)
