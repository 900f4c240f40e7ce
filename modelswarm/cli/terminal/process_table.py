"""The live table of `up`: every process with its own state, and for servers the gateway's view of them.

Pure: the supervisor's statuses and the gateway's snapshot in, a table out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modelswarm.cli.terminal.names import common_beginning, count_of
from modelswarm.cli.terminal.server_cells import name_cell, name_column, pages_cell
from modelswarm.cli.terminal.start_lines import phase_cell
from modelswarm.cli.terminal.states import (
    EXITED,
    NO_GATEWAY,
    NOT_LINKED,
    READY,
    STARTING,
    server_state,
    state_cell,
)
from modelswarm.cli.terminal.tables import Cell, Column, FittedTable, Row
from modelswarm.local.supervisor import JobState, JobStatus
from modelswarm.local.swarm import LocalServer
from modelswarm.placement.slots import coverage
from modelswarm.process.start_progress import StartProgress
from modelswarm.protocol.wire import api_pb2

_JOB_STATES = {JobState.STARTING: STARTING, JobState.READY: READY, JobState.WAITING: EXITED}


def process_table(
    name: str,
    servers: Sequence[LocalServer],
    gateways: Sequence[JobStatus],
    snapshot: api_pb2.Snapshot | None,
    gateway_starts: Mapping[str, StartProgress] | None = None,
) -> FittedTable:
    """Return the table of a swarm's processes. `snapshot` is None while no gateway answers.

    `gateway_starts`: progress of the gateways while the swarm starts; None: it has started.
    """
    known = None if snapshot is None else {server.peer: server for server in snapshot.servers}
    beginning = common_beginning([server.job_status.name for server in servers])
    columns = (
        name_column("process", beginning),
        Column("blocks"),
        Column("state"),
        Column("sessions", rank=3, right=True),
        Column("free pages", rank=2, short_title="free", right=True),
        Column("pid", right=True),
        Column("starts", rank=1, right=True),
        Column("last exit", rank=4),
    )
    starts = gateway_starts or {}
    rows = [
        *(_server_row(server, known, beginning) for server in servers),
        *(_row(each, Cell(each.name), "", _gateway_cell(each, starts), None) for each in gateways),
    ]
    is_starting = gateway_starts is not None
    title = f"{name} is starting" if is_starting else _title(name, servers, known)
    return FittedTable(title, columns, rows)


def _title(
    name: str, servers: Sequence[LocalServer], known: Mapping[str, api_pb2.Server] | None
) -> str:
    """Return the title, with the number of ready servers of the span that has the fewest."""
    ready = (each.slot.span for each in servers if _server_word(each, known) == READY)
    least = coverage((each.slot.span for each in servers), ready)
    if least:
        return f"{name}: at least {count_of(least, 'ready server')} for every block"
    return f"{name}: no ready server for some block"


def _server_row(
    server: LocalServer, known: Mapping[str, api_pb2.Server] | None, beginning: str
) -> Row:
    job = server.job_status
    is_starting = job.state is JobState.STARTING
    state = phase_cell(server.progress) if is_starting else state_cell(_server_word(server, known))
    name = name_cell(job.name, beginning)
    return _row(job, name, str(server.slot.span), state, _find_server(server, known))


def _gateway_cell(gateway: JobStatus, starts: Mapping[str, StartProgress]) -> Cell:
    """Return the state of a gateway; a gateway whose ports are open still waits for the model."""
    start = starts.get(gateway.name)
    is_up = gateway.state in (JobState.STARTING, JobState.READY)
    if start is not None and is_up and not start.is_ready:
        return phase_cell(start)
    return state_cell(_job_word(gateway))


def _row(
    job: JobStatus, name: Cell, blocks: str, state: Cell, server: api_pb2.Server | None
) -> Row:
    return (
        name,
        blocks,
        state,
        "" if server is None else str(server.sessions),
        "" if server is None else pages_cell(server),
        str(job.pid or ""),
        str(job.incarnation),
        _exit_cell(job),
    )


def _server_word(server: LocalServer, known: Mapping[str, api_pb2.Server] | None) -> str:
    """Return the word for a server's state: of its process, or of the gateway's view once the process is ready."""
    if server.job_status.state is not JobState.READY:
        return _job_word(server.job_status)
    if known is None:
        return NO_GATEWAY
    found = _find_server(server, known)
    return NOT_LINKED if found is None else server_state(found)


def _find_server(
    server: LocalServer, known: Mapping[str, api_pb2.Server] | None
) -> api_pb2.Server | None:
    """Return this very process in the gateway's view; not one before it with the same name."""
    if known is None or server.member is None:
        return None
    return known.get(server.member.peer)


def _job_word(job: JobStatus) -> str:
    return _JOB_STATES.get(job.state, job.state.value)


def _exit_cell(job: JobStatus) -> Cell:
    """Return why the last process ended, and when the next one starts."""
    if job.state is not JobState.WAITING:
        return Cell(job.exit_reason)
    restart = f"restarts in {job.restart_in:.1f} s"
    text = f"{job.exit_reason}, {restart}" if job.exit_reason else restart
    return Cell(text, short=job.exit_reason, style="red")
