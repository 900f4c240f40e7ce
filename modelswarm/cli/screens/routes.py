"""`modelswarm routes`: shows the cost of every server now, and why each session has its route."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from modelswarm.cli.terminal.names import common_beginning, count_of
from modelswarm.cli.terminal.server_cells import name_cell, name_column
from modelswarm.cli.terminal.states import READY, server_state, session_state, state_cell
from modelswarm.cli.terminal.tables import Column, FittedTable, make_console
from modelswarm.client.message_fields import session_name
from modelswarm.client.swarm import SwarmClient, format_route
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2

MAX_SHOWN_SESSIONS = 20
HOP_INDENT = 4  # columns before the lines of a route's hops
LAST_RESORT_COST_MS = 1e9  # a cost this high: used only if no other server holds some block


def show_routes(target: str, model: str) -> None:
    """Print the costs and routes of the gateway at `target`, of one model or of all."""
    with SwarmClient(target) as client:
        found = client.explain_routes(model)
        make_console().print(render_routes(found, client.fetch_snapshot()))


def render_routes(found: api_pb2.RoutesReply, snapshot: api_pb2.Snapshot) -> RenderableType:
    """Draw the costs as a table, and below it each session's route. `snapshot` has the states of both."""
    return Group(_cost_table(found, snapshot), *_route_lines(found, snapshot))


def _cost_table(found: api_pb2.RoutesReply, snapshot: api_pb2.Snapshot) -> RenderableType:
    states = {server.peer: server_state(server) for server in snapshot.servers}
    servers = sorted(found.servers, key=lambda one: (one.model, one.first, one.peer))
    beginning = common_beginning([name_of(server.peer) for server in servers])
    columns = (
        name_column("server", beginning),
        Column("blocks"),
        Column("zone", rank=1),
        Column("block", right=True),
        Column("hop", right=True),
        Column("wait", rank=5, right=True),
        Column("rtt", rank=3, right=True),
        Column("load", rank=4, right=True),
        Column("score", rank=2, right=True),
        Column("state"),
    )
    rows = [
        (
            name_cell(name_of(server.peer), beginning),
            f"{server.first}:{server.last}",
            server.zone or "-",
            _format_ms(server.block_ms),
            _format_ms(server.hop_ms),
            _format_ms(server.wait_ms),
            _format_ms(server.rtt_ms) if server.HasField("rtt_ms") else "-",
            f"{server.load:.1f}",
            f"{server.score:.2f}",
            state_cell(_cost_state(server, states.get(server.peer, READY))),
        )
        for server in servers
    ]
    return FittedTable("Costs of a hop", columns, rows)


def _cost_state(server: api_pb2.ServerCost, known: str) -> str:
    """Return the state that `status` shows; of a ready server, the reason for its cost if there is one."""
    return server.state if known == READY and server.state else known


def _route_lines(
    found: api_pb2.RoutesReply, snapshot: api_pb2.Snapshot
) -> Iterator[RenderableType]:
    states = {session.id: session_state(session) for session in snapshot.sessions}
    for session in found.sessions[:MAX_SHOWN_SESSIONS]:
        state = states.get(session.id, session.state)
        yield Text.assemble(
            f"{session_name(session.id)} ",
            (state, state_cell(state).style),
            f": {_current_cost(session) if session.hops else 'no route'}",
        )
        for hop in session.hops:
            yield Padding(_hop_line(hop), (0, 0, 0, HOP_INDENT), expand=False)
    hidden = len(found.sessions) - MAX_SHOWN_SESSIONS
    if hidden > 0:
        yield Text(f"({count_of(hidden, 'more session')} not shown)")


def _hop_line(hop: api_pb2.HopReason) -> str:
    """Return the hop, with its cost when it was chosen."""
    line = f"{name_of(hop.peer)} [{hop.first}:{hop.last}]"
    if not hop.options:
        return line
    if hop.options == 1:
        return f"{line} chosen at {_format_ms(hop.chosen_ms)}: the only option"
    if hop.peer == hop.best:
        return f"{line} chosen at {_format_ms(hop.chosen_ms)}: the best of {hop.options}"
    best = f"the best was {name_of(hop.best)} at {_format_ms(hop.best_ms)}"
    return f"{line} chosen at {_format_ms(hop.chosen_ms)} of {hop.options}: {best}"


def _current_cost(session: api_pb2.RouteReason) -> str:
    """Return the route's cost now and the best route's."""
    cost = (
        f"costs {_format_ms(session.cost_ms)}"
        if session.HasField("cost_ms")
        else "a server of its route was lost"
    )
    if not session.HasField("best_ms"):
        return f"{cost}; there is no route now"
    return f"{cost}; the best now is {_format_ms(session.best_ms)} by {format_route(tuple(session.best))}"


def _format_ms(value: float) -> str:
    return "last resort" if value >= LAST_RESORT_COST_MS else f"{value:.2f} ms"
