"""Options of `modelswarm chat`. The conversation is in `modelswarm.cli.chat`."""

from __future__ import annotations

from typing import Any

import click

from modelswarm.cli.options.sampling import gather_structure, option_fields, sampling_options
from modelswarm.cli.options.target import (
    admin_target,
    admin_target_options,
    http_target,
    model_option,
)


@click.command()
@click.option("--system", metavar="TEXT", help="System message before the conversation.")
@click.option(
    "--verbose",
    "-v",
    is_flag=True,
    help="Print the route after each answer, from the admin address.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each answer as a line of JSON.")
@model_option
@sampling_options
@admin_target_options
def chat(
    system: str | None,
    verbose: bool,
    as_json: bool,
    model: str | None,
    name: str | None,
    url: str | None,
    admin: str | None,
    **sampling: Any,
) -> int:
    """Chat with the model of a running swarm. /help shows the commands, /quit or Ctrl-D ends the chat.

    On a terminal, lines can be edited, and Up or Ctrl-R find earlier ones. A connection that breaks in an answer is
    made again, and the answer continues.
    """
    if admin is not None and not verbose:
        raise click.UsageError("--admin has an effect only with --verbose")
    fields, http = option_fields(**sampling), http_target(name, url)
    gather_structure(fields)  # two forms of an answer are refused
    target = admin_target(name, url, admin).address if verbose else None

    from modelswarm.cli.chat.run import run_chat

    return run_chat(http.base, target, model or http.model, system, fields, as_json)
