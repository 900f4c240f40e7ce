"""`modelswarm plan FILE`: shows the spans and the memory a swarm would need. Starts nothing."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from modelswarm.cli.terminal.names import count_of
from modelswarm.cli.terminal.tables import Column, FittedTable, make_console
from modelswarm.placement.memory import ServerMemory
from modelswarm.placement.plan import PAGE_SIZE, ServerPlan, SwarmPlan
from modelswarm.placement.quantity import human_bytes
from modelswarm.placement.spans import Span


def print_plan(swarm: SwarmPlan) -> None:
    make_console().print(render_plan(swarm))


def render_plan(swarm: SwarmPlan) -> RenderableType:
    """Draw the plan: its warnings, then a table of spans between running text."""
    warnings = [Text(f"warning: {warning}") for warning in swarm.warnings]
    head = f"{swarm.name}: {swarm.source}, {swarm.n_blocks} blocks as {swarm.dtype}, served as {swarm.served_name!r}"
    dtype = (
        f"Weights, KV and rows are {swarm.dtype}, {swarm.dtype_reason}. Servers compute on {swarm.hardware}. On a CPU "
        "each measures the fastest layout of its weights at its start, which its metrics show."
    )
    servers = (
        f"{count_of(swarm.replicas, 'server')} per span, {swarm.replicas * len(swarm.servers)} in all, "
        f"{human_bytes(swarm.total_bytes)} together. A page holds {PAGE_SIZE} tokens; "
        "a tenth of the pages is reserved for recovery."
    )
    sessions = (
        f"A session may have {count_of(swarm.max_length, 'token')}; one server of each span has room for "
        f"{swarm.full_sessions} such session{'' if swarm.full_sessions == 1 else 's'} at the same time."
    )
    if not swarm.has_given_pages and any(server.host is not None for server in swarm.servers):
        servers += " On accelerators the pages are an estimate: a server fills its device."
    memory = [Text(line) for line in memory_lines(swarm)]
    return Group(
        *warnings,
        Text(head),
        Text(""),
        _span_table(swarm),
        *memory,
        Text(dtype),
        Text(servers),
        Text(sessions),
    )


def _span_table(swarm: SwarmPlan) -> FittedTable:
    columns = (
        Column("span", right=True),
        Column("blocks"),
        Column("weights", rank=5, right=True),
        Column("KV/token", rank=1, right=True),
        Column("pages", rank=3, right=True),
        Column("KV", rank=4, right=True),
        Column("retained rows", rank=2, right=True),
        Column("total", right=True),
        Column("free KV tokens", right=True),
    )
    rows = [_row(index, server) for index, server in enumerate(swarm.servers)]
    return FittedTable("One server of each span", columns, rows)


def memory_lines(swarm: SwarmPlan) -> list[str]:
    """Return one sentence per kind of server with all parts of its memory."""
    lines = []
    for server in swarm.servers:
        lines.append(_memory_line("memory", server.span, server.memory))
        if server.host is not None:
            lines.append(_memory_line("memory beside the accelerator", server.span, server.host))
    return lines


def _memory_line(name: str, span: Span, memory: ServerMemory) -> str:
    return f"{name} of a server of {span}: {human_bytes(memory.total)} ({memory})"


def _row(index: int, server: ServerPlan) -> tuple[str, ...]:
    return (
        str(index),
        str(server.span),
        human_bytes(server.memory.weights),
        human_bytes(server.kv_bytes_per_token),
        str(server.pages),
        human_bytes(server.memory.kv),
        human_bytes(server.memory.retained),
        human_bytes(server.memory.total),
        str(server.free_tokens),
    )
