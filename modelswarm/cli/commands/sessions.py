"""Options of `modelswarm sessions list|show|close|fork`. Tables: `cli.screens.sessions`; JSON: `cli.json_output`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from modelswarm.cli.options.target import (
    HttpTarget,
    admin_target,
    admin_target_options,
    http_target,
    http_target_options,
)

if TYPE_CHECKING:
    from modelswarm.client.api.answers import SessionState
    from modelswarm.client.api.sync_client import Client

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
_MODEL = click.option(
    "--model", metavar="MODEL", help="Model of the session. Default: the gateway's first."
)


def _session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return _MODEL(http_target_options(_JSON(command)))


def _chosen(client: Client, target: HttpTarget, model: str | None) -> str | None:
    """Return `model`, by default the config file's; None: the first one. UserError names those that are served."""
    from modelswarm.cli.options.model import choose_model

    name = model or target.model
    return choose_model(client.models(), name).name if name else None


@click.group()
def sessions() -> None:
    """List sessions, and show, close or fork one that requests name by their session_id."""


@sessions.command("list")
@admin_target_options
@_JSON
def list_(name: str | None, url: str | None, admin: str | None, as_json: bool) -> None:
    """List the sessions of a swarm, of all its gateways if it runs on this machine.

    A session is shown by the hash of its session_id.
    """
    from modelswarm.cli.json_output.sessions import fetch_snapshots, list_fields

    snapshots = fetch_snapshots(admin_target(name, url, admin))
    if as_json:
        from modelswarm.cli.json_output.printing import print_json

        print_json(list_fields(snapshots))
    else:
        from modelswarm.cli.screens.sessions import print_session_tables

        print_session_tables(snapshots)


@sessions.command()
@click.argument("session_id", metavar="ID")
@_session_options
def show(
    session_id: str, model: str | None, name: str | None, url: str | None, as_json: bool
) -> None:
    """Show the session that requests name by the session_id ID."""
    from modelswarm.client.api.sync_client import Client

    target = http_target(name, url)
    with Client(target.base) as client:
        _print_state(
            client.session_state(session_id, model=_chosen(client, target, model)), as_json
        )


@sessions.command()
@click.argument("session_ids", metavar="ID...", nargs=-1, required=True)
@_session_options
def close(
    session_ids: tuple[str, ...],
    model: str | None,
    name: str | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Close sessions, which frees their KV at once. Exit code 1: one of them does not exist, or is answering.

    A session that is answering is not closed: its client ends the answer, by leaving it.
    """
    from modelswarm.cli.json_output.printing import print_json
    from modelswarm.client.api.errors import ConflictError
    from modelswarm.client.api.sync_client import Client

    target, missing = http_target(name, url), 0
    with Client(target.base) as client:
        chosen = _chosen(client, target, model)
        for session_id in session_ids:
            detail = "there is no such session"
            try:
                is_closed = client.close_session(session_id, model=chosen)
            except ConflictError as error:  # the others are closed
                is_closed, detail = False, str(error)
            missing += not is_closed
            if as_json:
                print_json({"id": session_id, "closed": is_closed})
            else:
                click.echo(f"{session_id}: {'closed' if is_closed else detail}")
    return 1 if missing else 0


@sessions.command()
@click.argument("session_id", metavar="ID")
@click.argument("new_id", metavar="[NEW_ID]", required=False)
@click.option(
    "--position",
    type=click.IntRange(min=1),
    metavar="N",
    help="Fork after the first N entries of its log. Default: all of them.",
)
@_session_options
def fork(
    session_id: str,
    new_id: str | None,
    position: int | None,
    model: str | None,
    name: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Open the session NEW_ID, by default one with a random name, with the log of the session ID."""
    from modelswarm.client.api.sync_client import Client

    target = http_target(name, url)
    with Client(target.base) as client:
        made = client.fork_session(
            session_id,
            new_session_id=new_id,
            position=position,
            model=_chosen(client, target, model),
        )
    _print_state(made, as_json)


def _print_state(session: SessionState, as_json: bool) -> None:
    if as_json:
        from modelswarm.cli.json_output.printing import print_json
        from modelswarm.cli.json_output.sessions import session_fields

        print_json(session_fields(session))
    else:
        from modelswarm.cli.screens.sessions import print_session

        print_session(session)
