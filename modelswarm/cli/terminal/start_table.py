"""`modelswarm status` while the swarm is starting: what each process does, and what it waits for."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from modelswarm.cli.json_output.start import WATCH_SECONDS, read_processes
from modelswarm.cli.terminal.names import common_beginning
from modelswarm.cli.terminal.server_cells import name_cell, name_column
from modelswarm.cli.terminal.start_lines import phase_cell
from modelswarm.cli.terminal.states import state_cell
from modelswarm.cli.terminal.tables import Column, FittedTable, can_redraw, make_console
from modelswarm.local.run_folder import StartInfo, find_starting
from modelswarm.local.start_state import ProcessStart


def show_start(start: StartInfo, watch: bool) -> None:
    """Print the processes of a starting swarm; with `watch` until it is ready."""
    out = make_console()
    if not watch:
        out.print(_draw(start))
    elif not can_redraw(out):
        while find_starting(start.name) is not None:
            out.print(_draw(start))
            time.sleep(WATCH_SECONDS)
    else:
        with Live(_draw(start), console=out, auto_refresh=False, transient=True) as live:
            while find_starting(start.name) is not None:
                live.update(_draw(start), refresh=True)
                time.sleep(WATCH_SECONDS)


def _draw(start: StartInfo) -> RenderableType:
    return render_start(start, read_processes(start)[0])


def render_start(start: StartInfo, processes: list[ProcessStart]) -> RenderableType:
    """Draw a table of the processes, and below it a line for each reason."""
    beginning = common_beginning(list(start.servers))
    columns = (
        name_column("process", beginning),
        Column("blocks"),
        Column("state"),
        Column("pid", rank=1, right=True),
    )
    rows = [
        (
            name_cell(each.name, beginning),
            each.blocks,
            state_cell("ready") if each.progress.is_ready else phase_cell(each.progress),
            str(each.pid or ""),
        )
        for each in processes
    ]
    title = f"{start.name} is starting (modelswarm up: pid {start.pid})"
    reasons = [
        Text(f"{each.name} waits: {' '.join(each.progress.reason.split())}")
        for each in processes
        if each.progress.reason
    ]
    return Group(FittedTable(title, columns, rows), *reasons)
