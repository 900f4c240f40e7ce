"""Cost of one more hop per token: the same small model over 1, 2 and 4 server processes, one stream.

The model is so small that the time between two tokens is almost only transport: link, event loop, engine thread.
"""

from __future__ import annotations

from statistics import median

from bench.harness import Bar, Result
from bench.models import model_folder
from bench.swarm import StreamClient, bench_swarm

NEW = 256
RUNS = 3


def run() -> Result:
    medians = {spans: measure_token_ms(spans) for spans in (1, 2, 4)}
    per_hop = (medians[4] - medians[1]) / 3
    rows = [(str(spans), f"{ms:.2f}") for spans, ms in medians.items()]
    figures = {f"token_ms_{spans}": ms for spans, ms in medians.items()}
    return Result(
        name="hop",
        figures={**figures, "ms_per_hop": per_hop},
        columns=("hops", "ms per token (median gap)"),
        rows=[*rows, ("each more", f"{per_hop:.2f}")],
        shape="Llama 1M fp32 (8 blocks), one stream",
        threads=1,
        bars=[Bar("ms_per_hop", "<=", 0.5)],
    )


def measure_token_ms(spans: int, server_flags: tuple[str, ...] = ()) -> float:
    """Return the median gap between tokens at the client, in ms; the minimum of RUNS runs."""
    with bench_swarm(model_folder("1m"), spans=spans, server_flags=server_flags) as swarm:
        client = StreamClient(swarm.grpc)
        client.run_stream([1, 2, 3], 32)
        return min(median(client.run_stream([1, 2, 3], NEW).gaps) * 1000 for _ in range(RUNS))
