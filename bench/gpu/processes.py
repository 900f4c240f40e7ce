"""Server processes that share one GPU: the memory of one, the cost of a hop, and recovery after a kill."""

from __future__ import annotations

import re
from pathlib import Path

from bench.gpu.report import Table
from bench.models import model_folder
from bench.recovery.gap_after_kill import measure_gaps
from bench.speed.hop import measure_token_ms
from bench.swarm import StreamClient, bench_swarm
from modelswarm.placement.memory import DEVICE_PROCESS_BYTES
from modelswarm.placement.quantity import human_bytes

FLAGS = ("--device", "cuda")
KILLS = 20
KILL_SECONDS = 150.0
"""No kill begins later: a killed server imports torch and captures its steps again before the next one."""


def measure_memory(table: Table) -> None:
    """Measure the most host memory that a server process had at once, until its first answer; weights are 4 MB."""
    with bench_swarm(model_folder("1m"), spans=1, server_flags=FLAGS) as swarm:
        StreamClient(swarm.grpc).run_stream([1, 2, 3], 32)
        status = Path(f"/proc/{swarm.servers[0].job_status.pid}/status").read_text()
    peak = int(re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[0]) << 10
    table.figures["host_mib"] = peak / 2**20
    counted = human_bytes(DEVICE_PROCESS_BYTES)
    table.add("memory", "Llama 1M, one server", human_bytes(peak), counted, "")


def measure_hop(table: Table) -> None:
    """Measure the time between two tokens over one and over two processes on the same GPU."""
    one, two = (measure_token_ms(spans, FLAGS) for spans in (1, 2))
    measured = f"{one:.2f} ms per token with one process, {two:.2f} with two"
    table.figures["hop_ms"] = two - one
    table.add("hop", "Llama 1M, one stream", measured, "", f"{two - one:.2f} ms per hop")


def measure_kills(table: Table) -> None:
    """Kill servers on the route, 2 spans x 2 servers on one GPU, and compare with the stream without a kill."""
    result = measure_gaps(KILLS, FLAGS, KILL_SECONDS).result("gpu", "kills", "", ())
    measured = ", ".join(
        f"{column} {value}" for column, value in zip(result.columns, result.rows[0], strict=True)
    )
    table.figures |= {f"kill_{name}": value for name, value in result.figures.items()}
    table.add("kill", "Llama 27M, 2 spans x 2 servers", measured, "", "")
