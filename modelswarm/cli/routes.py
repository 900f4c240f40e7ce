"""`modelswarm routes`: what every server costs a new session now, and why sessions have the routes they have."""

from __future__ import annotations

import json

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Group, RenderableType
from rich.text import Text

from modelswarm.cli.options.target import grpc_options, grpc_target
from modelswarm.cli.terminal.tables import console, table
from modelswarm.client.swarm import SwarmDoor, route_text
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2

SHOWN_SESSIONS = 20
LAST_RESORT_MS = 1e9  # a cost beyond this: only because nobody else holds some block


@click.command()
@click.option("--model", metavar="MODEL", default="", help="Only this model; default: all.")
@grpc_options
@click.option("--json", "as_json", is_flag=True, help="As JSON, for scripts.")
def routes(model: str, name: str | None, target: str | None, as_json: bool) -> None:
    """Show what a hop on each server costs now, and what each session's route was chosen against.

    A route costs, for every server in it, its `hop` once, its `block` for each block used, and the way between
    servers; `block` and `hop` are higher where a server is loaded, and are divided by its health score.
    """
    with SwarmDoor(grpc_target(name, target)) as door:
        found = door.routes(model)
    if as_json:
        click.echo(json.dumps(MessageToDict(found, preserving_proto_field_name=True)))
    else:
        console().print(drawn(found))


def drawn(found: api_pb2.RoutesReply) -> RenderableType:
    parts = [_servers(found)]
    if found.sessions:
        parts.append(_sessions(found))
    return Group(*parts)


def _servers(found: api_pb2.RoutesReply) -> RenderableType:
    columns = ("server", "blocks", "zone", "block", "hop", "wait", "rtt", "load", "score", "state")
    rows = [
        (
            name_of(server.peer),
            f"{server.first}:{server.last}",
            server.zone or "-",
            _ms(server.block_ms),
            _ms(server.hop_ms),
            _ms(server.wait_ms),
            _ms(server.rtt_ms) if server.HasField("rtt_ms") else "-",
            f"{server.load:.1f}",
            f"{server.score:.2f}",
            server.state or "ok",
        )
        for server in sorted(found.servers, key=lambda one: (one.model, one.first, one.peer))
    ]
    return table("Costs of a hop", columns, rows)


def _sessions(found: api_pb2.RoutesReply) -> RenderableType:
    shown = found.sessions[:SHOWN_SESSIONS]
    lines = [line for session in shown for line in _lines(session)]
    if len(found.sessions) > len(shown):
        lines.append(f"({len(found.sessions) - len(shown)} more sessions not shown)")
    return Text("\n".join(lines))


def _lines(session: api_pb2.RouteReason) -> list[str]:
    """What the whole route costs now and the best there is, then each hop with what was known when it was chosen."""
    name = session.id.rsplit(":", 1)[-1]
    if not session.hops:
        return [f"{name} {session.state}: no route"]
    return [f"{name} {session.state}: {_now(session)}", *map(_hop_line, session.hops)]


def _hop_line(hop: api_pb2.HopReason) -> str:
    line = f"    {name_of(hop.peer)} [{hop.first}:{hop.last}]"
    if not hop.options:
        return line
    if hop.options == 1:
        return f"{line} chosen at {_ms(hop.chosen_ms)}: the only one"
    if hop.peer == hop.best:
        return f"{line} chosen at {_ms(hop.chosen_ms)}: the best of {hop.options}"
    best = f"the best was {name_of(hop.best)} at {_ms(hop.best_ms)}"
    return f"{line} chosen at {_ms(hop.chosen_ms)} of {hop.options}: {best}"


def _now(session: api_pb2.RouteReason) -> str:
    cost = f"costs {_ms(session.cost_ms)}" if session.HasField("cost_ms") else "a server is gone"
    if not session.HasField("best_ms"):
        return f"{cost}; there is no route now"
    return f"{cost}; the best now is {_ms(session.best_ms)} by {route_text(tuple(session.best))}"


def _ms(value: float) -> str:
    return "last resort" if value >= LAST_RESORT_MS else f"{value:.2f} ms"
