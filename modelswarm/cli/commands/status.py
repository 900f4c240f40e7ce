"""Options of `modelswarm status`. The tables are in `cli.screens.status`, the JSON in `cli.json_output`."""

from __future__ import annotations

import click

from modelswarm.cli.options.target import admin_target, admin_target_options, find_elsewhere
from modelswarm.local.run_folder import find_starting


@click.command()
@admin_target_options
@click.option(
    "--session",
    metavar="ID",
    help="Only the session that requests name by this session_id; it is shown by its hash.",
)
@click.option("--watch", is_flag=True, help="Refresh once a second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def status(
    name: str | None,
    url: str | None,
    admin: str | None,
    session: str | None,
    watch: bool,
    as_json: bool,
) -> None:
    """Show the servers, spans, health and sessions of a running swarm, or what a starting one waits for."""
    is_local = admin is None and find_elsewhere(name, url) is None
    if is_local and _show_start(name, watch, as_json) and not watch:
        return
    target = admin_target(name, url, admin)
    if as_json:
        from modelswarm.cli.json_output.status import print_status

        print_status(target, session, watch)
    else:
        from modelswarm.cli.screens.status import show_status

        show_status(target, session, watch)


def _show_start(name: str | None, watch: bool, as_json: bool) -> bool:
    """Show a swarm that is still starting, with `watch` until it is ready; False if there is none."""
    starting = find_starting(name)
    if starting is None:
        return False
    if as_json:
        from modelswarm.cli.json_output.start import print_start

        print_start(starting, watch)
    else:
        from modelswarm.cli.terminal.start_table import show_start

        show_start(starting, watch)
    return True
