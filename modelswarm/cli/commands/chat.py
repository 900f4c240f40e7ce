"""Options of `modelswarm chat`. The conversation is in `modelswarm.cli.chat`."""

from __future__ import annotations

from typing import Any

import click

from modelswarm.cli.options.sampling import request_fields, sampling_options
from modelswarm.cli.options.target import (
    base_url,
    grpc_target,
    grpc_target_options,
    model_option,
)


@click.command()
@click.option("--system", metavar="TEXT", help="System message before the conversation.")
@click.option("--verbose", "-v", is_flag=True, help="Print the route after each answer, by gRPC.")
@model_option
@sampling_options
@grpc_target_options
def chat(
    system: str | None,
    verbose: bool,
    model: str | None,
    name: str | None,
    url: str | None,
    grpc: str | None,
    **sampling: Any,
) -> None:
    """Chat with the model of a running swarm. /help shows the commands, /quit or Ctrl-D ends the chat.

    On a terminal, lines can be edited, and Up or Ctrl-R find earlier ones. A connection that breaks in an answer is
    made again, and the answer continues.
    """
    if grpc is not None and not verbose:
        raise click.UsageError("--grpc has an effect only with --verbose")
    fields, base = request_fields(**sampling), base_url(name, url)
    target = grpc_target(name, url, grpc).address if verbose else None

    from modelswarm.cli.chat import run_chat

    run_chat(base, target, model, system, fields)
