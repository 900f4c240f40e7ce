"""Options of `modelswarm up FILE`. The work is in `modelswarm.cli.up`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from modelswarm.cli.options.document import read_document
from modelswarm.errors import UserError
from modelswarm.process.command_line import Seconds, device, split_target, threads
from modelswarm.process.cors_origins import check_cors_origins

MAX_GATEWAYS = 16


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="Name of the swarm, instead of metadata.name in FILE.")
@click.option(
    "--http", default="127.0.0.1:8000", show_default=True, help="Address of the OpenAI HTTP API."
)
@click.option(
    "--grpc",
    default="127.0.0.1:8001",
    show_default=True,
    help="Address of the gRPC API for clients.",
)
@click.option(
    "--metrics", default="127.0.0.1:8002", show_default=True, help="Address of Prometheus metrics."
)
@click.option(
    "--admin",
    default="127.0.0.1:8003",
    show_default=True,
    help="Address of the gRPC API for status, routes and drain.",
)
@click.option(
    "--gateways",
    type=click.IntRange(1, MAX_GATEWAYS),
    default=1,
    show_default=True,
    help="Number of gateways. Those after the first get free ports of the same hosts.",
)
@click.option(
    "--memory",
    metavar="AMOUNT",
    help="Memory of one server, e.g. 2Gi: all that its process takes, instead of the pools' limits. Only on "
    "the CPU.",
)
@click.option(
    "--device",
    type=device,
    default="auto",
    show_default=True,
    help="Device on which the servers compute: auto (an accelerator if there is one), cpu, cuda, cuda:0.",
)
@click.option(
    "--threads",
    type=threads,
    default="auto",
    show_default=True,
    help="CPU threads per server; auto: the CPUs of this machine or container, divided among the servers.",
)
@click.option(
    "--lease",
    type=Seconds(0, 86400, min_open=True),
    help="Seconds that a lost gateway's sessions are kept for it. Default: 30.",
)
@click.option(
    "--hold-limit",
    type=Seconds(0, 86400),
    help="Seconds that a session waits for a lost server, instead of sessions.holdLimit in FILE.",
)
@click.option(
    "--tool-call-parser",
    default="",
    metavar="NAME",
    help="Parser of tool calls for all models, like hermes; none: requests with tools are refused. "
    "Default: found by each model's chat template.",
)
@click.option("--vllm-metrics", is_flag=True, help="Export the metrics under vLLM's names too.")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin whose web pages may send requests, like https://chat.example.com; '*': any. May be repeated.",
)
@click.option(
    "--table/--no-table",
    "with_table",
    default=True,
    help="Show a live table on the terminal, or only print lines.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each event as a line of JSON.")
@click.option("--hash-model", is_flag=True, help="Run a hash function as the model, for tests.")
def up(
    file: Path,
    name: str | None,
    memory: str | None,
    with_table: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Run the swarm of FILE on this machine, until Ctrl-C. With - the document is read from standard input.

    Every span gets its server processes, and gateways answer OpenAI clients. A process that dies is started again;
    meanwhile streams continue on the other servers.
    """
    for field in ("http", "grpc", "metrics", "admin"):
        split_target(f"--{field}", chosen[field])
    check_cors_origins(chosen["cors_origins"])
    document = read_document(file, name)
    if document.spec.paused:
        raise UserError("spec.paused", "true; allowed to start it: false")

    from modelswarm.local.commands import LocalSettings

    settings = LocalSettings(**chosen)
    if as_json:
        from modelswarm.cli.json_output.up import run_up_json

        run_up_json(document, memory, settings)
    else:
        from modelswarm.cli.up import run_up

        run_up(document, memory, with_table, settings)
