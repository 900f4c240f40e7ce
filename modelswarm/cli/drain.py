"""`modelswarm drain SERVER`: has all sessions leave a server, and waits until it is empty."""

from __future__ import annotations

import click

from modelswarm.cli.options.target import grpc_target_options, grpc_target
from modelswarm.client.swarm import DrainTimeoutError, SwarmClient
from modelswarm.errors import ModelSwarmError
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2

_SECONDS = click.FloatRange(min=0, max=86400)


@click.command()
@click.argument("server")
@grpc_target_options
@click.option("--undo", is_flag=True, help="Use the server again.")
@click.option(
    "--wait",
    type=_SECONDS,
    default=0.0,
    show_default=True,
    help="Seconds to wait for another server of blocks that only this one holds; 0: refuse.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=86400),
    default=600.0,
    show_default=True,
    help="Seconds until this command gives up waiting; the drain goes on.",
)
def drain(
    server: str, name: str | None, target: str | None, undo: bool, wait: float, timeout: float
) -> None:
    """Move all sessions off SERVER, which works on meanwhile, and keep new ones away.

    SERVER is a name that `modelswarm status` shows. Readers do not notice: what a session needs is copied first.
    It covers the sessions of all gateways, whichever is asked: the server tells the others. So does --undo.
    Exit code 0: the server is empty. 1: it is not.
    """
    with SwarmClient(grpc_target(name, target)) as door:
        last, said = api_pb2.DrainState(), ""
        try:
            for state in door.drain_server(server, undo=undo, wait=wait, timeout=wait + timeout):
                line = _describe(state, undo)
                if line not in ("", said):
                    click.echo(f"{name_of(state.peer)}: {line}")
                last, said = state, line
        except DrainTimeoutError as error:
            left = _remaining(last)
            said = f"{left} still there" if left else "it has not said that it is empty"
            raise ModelSwarmError(f"{server}: {said} after {timeout:g} s") from error


def _describe(state: api_pb2.DrainState, undo: bool) -> str:
    if state.gone:
        return "gone"
    if undo:
        return "used again"
    if state.done:
        return "empty"
    if state.uncovered_blocks:
        blocks = ", ".join(map(str, state.uncovered_blocks))
        return f"waits for another server of blocks {blocks}"
    left = _remaining(state)
    return f"{left} to move" if left else ""


def _remaining(state: api_pb2.DrainState) -> str:
    """Of whom sessions are there; empty when there are none."""
    counts = ((state.own_sessions, ""), (state.other_sessions, " of other gateways"))
    return " and ".join(f"{_count_sessions(count)}{whose}" for count, whose in counts if count)


def _count_sessions(count: int) -> str:
    return f"{count} session{'' if count == 1 else 's'}"
