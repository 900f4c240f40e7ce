"""`modelswarm routes`: shows the cost of every server now, and why each session has its route."""

from __future__ import annotations

import json

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Group, RenderableType
from rich.text import Text

from modelswarm.cli.options.target import grpc_target, grpc_target_options
from modelswarm.cli.terminal.tables import make_console, make_table
from modelswarm.client.swarm import SwarmClient, format_route
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2

MAX_SHOWN_SESSIONS = 20
LAST_RESORT_COST_MS = 1e9  # a cost this high: used only if no other server holds some block


@click.command()
@click.option("--model", metavar="MODEL", default="", help="Only this model. Default: all.")
@grpc_target_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def routes(model: str, name: str | None, target: str | None, as_json: bool) -> None:
    """Show the cost of each server and the reason for each route.

    The cost of a route is the sum over its servers of `hop`, of `block` for each block used, and of the network
    time between servers. `block` and `hop` grow with a server's load and are divided by its health score.
    """
    with SwarmClient(grpc_target(name, target)) as client:
        found = client.explain_routes(model)
    if as_json:
        click.echo(json.dumps(MessageToDict(found, preserving_proto_field_name=True)))
    else:
        make_console().print(render_routes(found))


def render_routes(found: api_pb2.RoutesReply) -> RenderableType:
    parts = [_cost_table(found)]
    if found.sessions:
        parts.append(_route_list(found))
    return Group(*parts)


def _cost_table(found: api_pb2.RoutesReply) -> RenderableType:
    columns = ("server", "blocks", "zone", "block", "hop", "wait", "rtt", "load", "score", "state")
    rows = [
        (
            name_of(server.peer),
            f"{server.first}:{server.last}",
            server.zone or "-",
            _format_ms(server.block_ms),
            _format_ms(server.hop_ms),
            _format_ms(server.wait_ms),
            _format_ms(server.rtt_ms) if server.HasField("rtt_ms") else "-",
            f"{server.load:.1f}",
            f"{server.score:.2f}",
            server.state or "ok",
        )
        for server in sorted(found.servers, key=lambda one: (one.model, one.first, one.peer))
    ]
    return make_table("Costs of a hop", columns, rows)


def _route_list(found: api_pb2.RoutesReply) -> RenderableType:
    shown = found.sessions[:MAX_SHOWN_SESSIONS]
    lines = [line for session in shown for line in _session_lines(session)]
    if len(found.sessions) > len(shown):
        lines.append(f"({len(found.sessions) - len(shown)} more sessions not shown)")
    return Text("\n".join(lines))


def _session_lines(session: api_pb2.RouteReason) -> list[str]:
    """Return the route's cost now and the best route's, then each hop with its cost when it was chosen."""
    name = session.id.rsplit(":", 1)[-1]
    if not session.hops:
        return [f"{name} {session.state}: no route"]
    return [f"{name} {session.state}: {_current_cost(session)}", *map(_hop_line, session.hops)]


def _hop_line(hop: api_pb2.HopReason) -> str:
    line = f"    {name_of(hop.peer)} [{hop.first}:{hop.last}]"
    if not hop.options:
        return line
    if hop.options == 1:
        return f"{line} chosen at {_format_ms(hop.chosen_ms)}: the only option"
    if hop.peer == hop.best:
        return f"{line} chosen at {_format_ms(hop.chosen_ms)}: the best of {hop.options}"
    best = f"the best was {name_of(hop.best)} at {_format_ms(hop.best_ms)}"
    return f"{line} chosen at {_format_ms(hop.chosen_ms)} of {hop.options}: {best}"


def _current_cost(session: api_pb2.RouteReason) -> str:
    cost = (
        f"costs {_format_ms(session.cost_ms)}"
        if session.HasField("cost_ms")
        else "a server of its route is gone"
    )
    if not session.HasField("best_ms"):
        return f"{cost}; there is no route now"
    return f"{cost}; the best now is {_format_ms(session.best_ms)} by {format_route(tuple(session.best))}"


def _format_ms(value: float) -> str:
    return "last resort" if value >= LAST_RESORT_COST_MS else f"{value:.2f} ms"
