"""Options of `modelswarm plan FILE`. `modelswarm.cli.plan` has the table, `modelswarm.cli.json_output` the JSON."""

from __future__ import annotations

from pathlib import Path

import click

from modelswarm.cli.options.document import read_document
from modelswarm.process.command_line import device


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--memory",
    metavar="AMOUNT",
    help="Memory of one server, e.g. 2Gi, instead of the pools' limits. Only on the CPU.",
)
@click.option(
    "--device",
    type=device,
    default="auto",
    show_default=True,
    help="Device on which the servers compute, as `up` takes it; it may decide the number format.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def plan(file: Path, memory: str | None, device: str, as_json: bool) -> None:
    """Show the spans and memory per server that FILE would get. With - the document is read from standard input.

    Reads the model's files, and starts nothing.
    """
    document = read_document(file)

    from modelswarm.local.planning import plan_document

    planned = plan_document(document, memory, device)
    if as_json:
        from modelswarm.cli.json_output.plan import plan_fields
        from modelswarm.cli.json_output.printing import print_json

        print_json(plan_fields(planned))
    else:
        from modelswarm.cli.plan import print_plan

        print_plan(planned)
