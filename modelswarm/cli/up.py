"""`modelswarm up FILE`: runs a swarm on this machine until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from modelswarm.cli.plan import memory_lines
from modelswarm.cli.terminal.process_table import process_table
from modelswarm.cli.terminal.signals import run_until_signal
from modelswarm.cli.terminal.start_lines import PhaseLog
from modelswarm.cli.terminal.tables import can_redraw, make_console
from modelswarm.client.swarm import SwarmClient, SwarmClientError
from modelswarm.local.commands import LocalSettings, gateway_names
from modelswarm.local.planning import plan_document, unused_fields
from modelswarm.local.run_folder import RunInfo
from modelswarm.local.start_watch import StartView, StartWatch
from modelswarm.local.supervisor import JobChange, JobState
from modelswarm.local.swarm import LocalSwarm
from modelswarm.process.start_progress import StartProgress
from modelswarm.protocol.wire import api_pb2
from modelswarm.resources.spec import ModelSwarm

REFRESH_SECONDS = 0.5


def run_up(
    document: ModelSwarm, memory: str | None, with_table: bool, settings: LocalSettings
) -> None:
    """Run the swarm of a document until a signal, and print its states: as lines, or as a live table below them."""
    plan = plan_document(document, memory, settings.device)
    out = make_console()
    for field in unused_fields(document):
        out.print(f"note: {field} is not used on one machine")
    for warning in plan.warnings:
        out.print(f"warning: {warning}")
    for line in memory_lines(plan):
        out.print(line)
    log = ProcessLog(out, gateway_names(settings.gateways))
    swarm = LocalSwarm(plan, settings, log)
    with run_until_signal(swarm.stop, lambda: out.print("stopping ...")):
        info = _start(swarm, out, with_table and can_redraw(out))
        log.has_started = True
        _print_addresses(out, info)
        _watch(swarm, out, with_table and can_redraw(out))
    out.print("stopped")


class ProcessLog:
    """Prints the state changes of processes as lines; a live table stays below them."""

    def __init__(self, out: Console, gateways: Collection[str]) -> None:
        self._out, self._gateways = out, gateways
        # While the swarm starts, an exit is reported once, by the error that ends the command, and a gateway is
        # ready only with the swarm.
        self.has_started = False

    def __call__(self, change: JobChange) -> None:
        job = change.job
        if job.state is JobState.STARTING:
            self._out.print(f"{job.name}: starting (pid {job.pid})")
        elif job.state is JobState.READY and (self.has_started or job.name not in self._gateways):
            self._out.print(f"{job.name}: ready")
        elif job.state is JobState.WAITING and self.has_started:
            self._out.print(f"{job.name}: {job.exit_reason}, restarting in {job.restart_in:.1f} s")
            for line in change.log_tail:
                self._out.print(f"  {line}")


def _start(swarm: LocalSwarm, out: Console, live_table: bool) -> RunInfo:
    """Start the swarm, and meanwhile show what each process does, and what it waits for."""
    screen = StartScreen(swarm, out, live_table)
    with screen, StartWatch(swarm, screen.show):
        return swarm.start()


class StartScreen:
    """Shows a start: phases in a live table or as lines, and reasons that last as lines in both cases."""

    def __init__(self, swarm: LocalSwarm, out: Console, live_table: bool) -> None:
        self._swarm, self._out = swarm, out
        self._phases = PhaseLog()
        self._live = Live(console=out, auto_refresh=False, transient=True) if live_table else None
        self._logs_told = False

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, view: StartView) -> None:
        if not self._logs_told:
            self._out.print(f"logs: {self._swarm.logs} (or: modelswarm logs)")
            self._logs_told = True
        progress = view.progress()
        if self._live is None:
            self._print_lines(self._phases.phase_lines(progress))
        self._print_lines(self._phases.reason_lines(progress, time.monotonic()))
        if self._live is not None:
            name, starts = self._swarm.plan.name, view.gateway_progress
            drawn = process_table(name, view.servers, view.gateways, None, starts)
            self._live.update(drawn, refresh=True)

    def _print_lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._out.print(line)


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
        phases = PhaseLog()
        while True:
            swarm.raise_if_failed()
            for line in phases.phase_lines(_restarts(swarm)):
                out.print(line)
            time.sleep(REFRESH_SECONDS)
    with ExitStack() as stack:
        targets = [gateway.admin for gateway in swarm.gateway_addresses]
        clients = [stack.enter_context(SwarmClient(target)) for target in targets]
        live = stack.enter_context(Live(console=out, auto_refresh=False, transient=True))
        while True:
            swarm.raise_if_failed()
            live.update(render_processes(swarm, clients), refresh=True)
            time.sleep(REFRESH_SECONDS)


def _restarts(swarm: LocalSwarm) -> dict[str, StartProgress]:
    """Return the progress of servers that are started again."""
    return {
        server.job_status.name: server.progress
        for server in swarm.servers
        if server.job_status.state is JobState.STARTING
    }


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
