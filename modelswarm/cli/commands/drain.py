"""`modelswarm drain SERVER`: migrates all sessions off a server, and waits until it is empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from modelswarm.cli.options.target import admin_target, admin_target_options, complete_server
from modelswarm.errors import ModelSwarmError
from modelswarm.process.command_line import Seconds

if TYPE_CHECKING:
    from modelswarm.client.swarm import SwarmClient
    from modelswarm.protocol.wire import api_pb2

_SECONDS = Seconds(min=0, max=86400)


@click.command()
@click.argument("server", shell_complete=complete_server)
@admin_target_options
@click.option("--undo", is_flag=True, help="End the drain: use the server again.")
@click.option(
    "--wait",
    type=_SECONDS,
    default=0.0,
    show_default=True,
    help="Seconds to wait for another server, if only this one holds some block. 0: refuse the drain.",
)
@click.option(
    "--timeout",
    type=Seconds(min=0, min_open=True, max=86400),
    default=600.0,
    show_default=True,
    help="Seconds after those of --wait after which this command stops waiting. The drain continues.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each state as a line of JSON.")
def drain(
    server: str,
    name: str | None,
    url: str | None,
    admin: str | None,
    undo: bool,
    wait: float,
    timeout: float,
    as_json: bool,
) -> None:
    """Migrate all sessions off SERVER and send it no new ones. It keeps working meanwhile.

    SERVER is a name that `modelswarm status` shows, in full or in its short form. Streams are not interrupted: a
    session's KV is copied first.
    The drain covers the sessions of all gateways, because the server reports it to each of them; so does --undo.
    Exit code 0: the server is empty. 1: it is not.
    """
    if undo and wait:
        raise click.UsageError("--wait has an effect only without --undo")
    target = admin_target(name, url, admin).address

    from modelswarm.client.swarm import DrainTimeoutError, SwarmClient
    from modelswarm.protocol.wire import api_pb2

    report = _print_facts if as_json else _LinePrinter(undo)
    with SwarmClient(target) as client:
        last = api_pb2.DrainProgress()
        server = _full_name(client, server)
        try:
            for state in client.drain_server(server, undo=undo, wait=wait, timeout=wait + timeout):
                report(state)
                last = state
        except DrainTimeoutError as error:
            left = _remaining(last)
            message = f"{left} still there" if left else "it has not reported that it is empty"
            raise ModelSwarmError(f"{server}: {message} after {wait + timeout:g} s") from error


def _full_name(client: SwarmClient, server: str) -> str:
    """Return the name of the server that `server` names in full or in short; else `server` itself, to be refused."""
    from modelswarm.cli.terminal.names import find_name
    from modelswarm.protocol.identity import name_of

    return find_name(server, [name_of(each.peer) for each in client.fetch_snapshot().servers])


def _print_facts(state: api_pb2.DrainProgress) -> None:
    from modelswarm.cli.json_output.printing import print_json
    from modelswarm.client.message_fields import message_fields

    print_json(message_fields(state))


class _LinePrinter:
    """Prints each state as a sentence, unless it is the one before."""

    def __init__(self, undo: bool) -> None:
        self._undo, self._last = undo, ""

    def __call__(self, state: api_pb2.DrainProgress) -> None:
        from modelswarm.protocol.identity import name_of

        line = _describe(state, self._undo)
        if line not in ("", self._last):
            click.echo(f"{name_of(state.peer)}: {line}")
        self._last = line


def _describe(state: api_pb2.DrainProgress, undo: bool) -> str:
    if state.gone:
        return "gone"
    if undo:
        return "used again"
    if state.done:
        return "empty"
    if state.uncovered_blocks:
        from modelswarm.placement.spans import format_blocks

        blocks = format_blocks(state.uncovered_blocks)
        return f"waiting for another server of blocks {blocks}"
    left = _remaining(state)
    return f"{left} to migrate" if left else ""


def _remaining(state: api_pb2.DrainProgress) -> str:
    """Return the sessions still there, as `2 sessions and 1 session of other gateways`; empty if none."""
    from modelswarm.cli.terminal.names import count_of

    counts = ((state.own_sessions, ""), (state.other_sessions, " of other gateways"))
    return " and ".join(f"{count_of(count, 'session')}{owner}" for count, owner in counts if count)
