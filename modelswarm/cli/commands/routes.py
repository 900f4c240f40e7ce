"""Options of `modelswarm routes`. The tables are in `cli.screens.routes`, the JSON in `cli.json_output`."""

from __future__ import annotations

import click

from modelswarm.cli.options.target import admin_target, admin_target_options


@click.command()
@click.option("--model", metavar="MODEL", default="", help="Only this model. Default: all.")
@admin_target_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def routes(model: str, name: str | None, url: str | None, admin: str | None, as_json: bool) -> None:
    """Show the cost of each server and the reason for each route.

    The cost of a route is a sum over its servers: `hop`, `block` for each block used, and the network time between
    servers. `block` and `hop` grow with a server's load and are divided by its health score.
    """
    target = admin_target(name, url, admin)
    if as_json:
        from modelswarm.cli.json_output.routes import print_routes

        print_routes(target.address, model)
    else:
        from modelswarm.cli.screens.routes import show_routes

        show_routes(target.address, model)
