"""`modelswarm plan FILE`: shows the spans and the memory a swarm would need. Starts nothing."""

from __future__ import annotations

from pathlib import Path

import click

from modelswarm.cli.terminal.tables import make_console, make_table
from modelswarm.local.planning import plan_file
from modelswarm.placement.plan import PAGE_SIZE, ServerPlan, SwarmPlan
from modelswarm.placement.quantity import human_bytes


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--memory",
    metavar="AMOUNT",
    help="Memory of one server, e.g. 2Gi, instead of the pools' limits.",
)
def plan(file: Path, memory: str | None) -> None:
    """Show the spans and memory per server that FILE would get.

    Reads the model's files, and starts nothing.
    """
    print_plan(plan_file(file, memory))


def print_plan(swarm: SwarmPlan) -> None:
    out = make_console()
    for warning in swarm.warnings:
        click.echo(f"warning: {warning}")
    out.print(
        f"{swarm.name}: {swarm.source}, {swarm.n_blocks} blocks as {swarm.dtype}, served as {swarm.served_name!r}"
    )
    columns = (
        "span",
        "blocks",
        "weights",
        "KV/token",
        "pages",
        "KV",
        "replay log",
        "total",
        "free KV tokens",
    )
    rows = [_row(index, server) for index, server in enumerate(swarm.servers)]
    out.print(make_table("One server of each span", columns, rows))
    out.print(
        f"{swarm.replicas} servers per span, {swarm.replicas * len(swarm.servers)} in all, "
        f"{human_bytes(swarm.total_bytes)} together. A page holds {PAGE_SIZE} tokens; "
        "a tenth of the pages is reserved for recovery."
    )
    out.print(
        f"A session may have {swarm.max_length} tokens; one server of each span has room for "
        f"{swarm.full_sessions} such sessions at the same time."
    )


def _row(index: int, server: ServerPlan) -> tuple[str, ...]:
    return (
        str(index),
        str(server.span),
        human_bytes(server.weight_bytes),
        human_bytes(server.kv_bytes_per_token),
        str(server.pages),
        human_bytes(server.kv_bytes),
        human_bytes(server.replay_bytes),
        human_bytes(server.total_bytes),
        str(server.free_tokens),
    )
