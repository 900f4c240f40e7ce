"""Server processes that share one GPU: the cost of a hop, and recovery after a kill."""

from __future__ import annotations

from bench.gpu.report import Table
from bench.recovery.gap_after_kill import measure_gaps
from bench.speed.hop import measure_token_ms

FLAGS = ("--device", "cuda")
KILLS = 20


def measure_hop(table: Table) -> None:
    """Measure the time between two tokens over one and over two processes on the same GPU."""
    one, two = (measure_token_ms(spans, FLAGS) for spans in (1, 2))
    measured = f"{one:.2f} ms per token with one process, {two:.2f} with two"
    table.figures["hop_ms"] = two - one
    table.add("hop", "Llama 1M, one stream", measured, "", f"{two - one:.2f} ms per hop")


def measure_kills(table: Table) -> None:
    """Kill servers on the route, 2 spans x 2 servers on one GPU, and compare with the stream without a kill."""
    result = measure_gaps(KILLS, FLAGS).result("gpu", "kills", "", ())
    measured = ", ".join(
        f"{column} {value}" for column, value in zip(result.columns, result.rows[0], strict=True)
    )
    table.figures |= {f"kill_{name}": value for name, value in result.figures.items()}
    table.add("kill", "Llama 27M, 2 spans x 2 servers", measured, "", "")
