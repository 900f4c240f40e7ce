"""`modelswarm up FILE`: runs a swarm on this machine until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import click
from rich.console import Console, RenderableType
from rich.live import Live

from modelswarm.cli.plan import memory_lines
from modelswarm.cli.terminal.process_table import process_table
from modelswarm.cli.terminal.signals import ignore_signals, interrupt_on_signals
from modelswarm.cli.terminal.tables import make_console
from modelswarm.client.swarm import SwarmClient, SwarmClientError
from modelswarm.local.commands import LocalSettings
from modelswarm.local.planning import plan_document, unused_fields
from modelswarm.local.run_folder import RunInfo
from modelswarm.local.supervisor import JobChange, JobState
from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.wire import api_pb2
from modelswarm.resources.spec import ModelSwarm

REFRESH_SECONDS = 0.5


def run_up(
    document: ModelSwarm, memory: str | None, with_table: bool, settings: LocalSettings
) -> None:
    """Run the swarm of a document until a signal, and print its states: as lines, or as a live table below them."""
    plan = plan_document(document, memory)
    out = make_console()
    for field in unused_fields(document):
        out.print(f"note: {field} is not used on one machine")
    for warning in plan.warnings:
        click.echo(f"warning: {warning}")
    for line in memory_lines(plan):
        out.print(line)
    log = ProcessLog(out)
    swarm = LocalSwarm(plan, settings, log)
    with interrupt_on_signals():
        try:
            info = swarm.start()
            log.report_exits = True
            _print_addresses(out, info)
            _watch(swarm, out, with_table and out.is_terminal)
        except KeyboardInterrupt:
            out.print("stopping ...")
        finally:
            ignore_signals()
            swarm.stop()
    out.print("stopped")


class ProcessLog:
    """Prints the state changes of processes as lines; a live table stays below them."""

    def __init__(self, out: Console) -> None:
        self._out = out
        # While the swarm starts, an exit is reported once, by the error that ends the command.
        self.report_exits = False

    def __call__(self, change: JobChange) -> None:
        job = change.job
        if job.state is JobState.STARTING:
            self._out.print(f"{job.name}: starting (pid {job.pid})")
        elif job.state is JobState.READY:
            self._out.print(f"{job.name}: ready")
        elif job.state is JobState.WAITING and self.report_exits:
            self._out.print(f"{job.name}: {job.exit_reason}, restarting in {job.restart_in:.1f} s")
            for line in change.log_tail:
                self._out.print(f"  {line}")


def _print_addresses(out: Console, info: RunInfo) -> None:
    out.print(
        f"ready: {info.model} at http://{info.http}/v1 (gRPC {info.grpc}, metrics {info.metrics})"
    )
    for other in info.other_gateways:
        out.print(
            f"{other.name}: http://{other.http}/v1 (gRPC {other.grpc}, metrics {other.metrics})"
        )
    out.print("in another terminal: modelswarm chat, modelswarm status. Ctrl-C stops everything.")


def _watch(swarm: LocalSwarm, out: Console, live_table: bool) -> None:
    """Show the processes until a signal. Raises the supervisor's error if that fails."""
    if not live_table:
        while True:
            swarm.raise_if_failed()
            time.sleep(REFRESH_SECONDS)
    with ExitStack() as stack:
        targets = [gateway.grpc for gateway in swarm.gateway_addresses]
        clients = [stack.enter_context(SwarmClient(target)) for target in targets]
        live = stack.enter_context(Live(console=out, auto_refresh=False, transient=True))
        while True:
            swarm.raise_if_failed()
            live.update(render_processes(swarm, clients), refresh=True)
            time.sleep(REFRESH_SECONDS)


def render_processes(swarm: LocalSwarm, clients: Sequence[SwarmClient]) -> RenderableType:
    """Draw every process of the swarm, as a table with the view of the first gateway that answers."""
    return process_table(swarm.plan.name, swarm.servers, swarm.gateways, _fetch_snapshot(clients))


def _fetch_snapshot(clients: Sequence[SwarmClient]) -> api_pb2.Snapshot | None:
    """Return the view of the first gateway that answers; None if none does."""
    for client in clients:
        try:
            return client.fetch_snapshot(REFRESH_SECONDS)
        except SwarmClientError:
            continue
    return None
