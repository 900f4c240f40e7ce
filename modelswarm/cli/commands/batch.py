"""Options of `modelswarm batch INPUT -o OUTPUT`. The work is in `modelswarm.cli.batch`."""

from __future__ import annotations

from pathlib import Path

import click

from modelswarm.cli.options.document import STANDARD_INPUT
from modelswarm.cli.options.target import http_target, http_target_options, model_option
from modelswarm.errors import UserError
from modelswarm.process.command_line import Seconds


@click.command()
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="OUTPUT",
    type=click.Path(path_type=Path),
    help="File for the answers. If it has answers of an earlier run, the others are added.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    default=16,
    show_default=True,
    help="Requests that run at a time.",
)
@click.option(
    "--timeout",
    type=Seconds(1.0, 86400.0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Limit of one answer; then its line fails.",
)
@click.option(
    "--retry-for",
    type=Seconds(0.0, 86400.0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a request is tried again while the gateway is away or full.",
)
@click.option(
    "--retry-failed",
    is_flag=True,
    help="Run lines of an earlier run again whose status is not 200.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@model_option
@http_target_options
def batch(
    source: Path,
    output: Path,
    concurrency: int,
    timeout: float,
    retry_for: float,
    retry_failed: bool,
    as_json: bool,
    model: str | None,
    name: str | None,
    url: str | None,
) -> int:
    """Send the requests of INPUT, a file in OpenAI's batch format, and write the answers to OUTPUT.

    Answers are written in the order in which they are completed. After a crash or Ctrl-C the same command goes on:
    no request that has an answer is run again. The exit code is 1 if a line failed.
    """
    for field, path in (("INPUT", source), ("--output", output)):
        if str(path) == STANDARD_INPUT:
            detail = "allowed: a file, which the run after a crash reads again"
            raise UserError(field, f"- is not a file; {detail}")

    from modelswarm.cli.batch.run import BatchOptions, run_batch
    from modelswarm.cli.batch.sending import RequestTimeouts

    target = http_target(name, url)
    options = BatchOptions(
        model or target.model, concurrency, RequestTimeouts(timeout, retry_for), as_json
    )
    return run_batch(target.base, source, output, retry_failed, options)
