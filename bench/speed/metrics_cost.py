"""Cost of the metrics: microseconds per token and turn of a gateway and per step of a server, milliseconds per scrape.

One process, no network: the calls of the hot paths, in a loop. A scrape runs on the gateway's event loop, so it delays
all tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client import generate_latest

from bench.harness import Bar, Result
from modelswarm.protocol.identity import Epoch
from modelswarm_gateway.core.interface.views import HopView, SessionView
from modelswarm_gateway.metrics.counters import Metrics as GatewayMetrics
from modelswarm_gateway.metrics.counters import TurnOutcome
from modelswarm_serving.metrics import Metrics as ServerMetrics
from modelswarm_serving.model.base import Compute, ModelShape
from tools.dashboard.metric_registries import BLOCKS, MODEL, make_hello, make_node

RUNS, SESSIONS = 5, 1000
ROUTE = (HopView("a/1/x", 0, 4), HopView("b/1/x", 4, 8))
PARKED = SessionView("s", MODEL, "parked", Epoch(0, 1), 10, ROUTE, 0, 0)
COST_NAMES = {
    "token_us": "us per token",
    "turn_us": "us per turn",
    "step_us": "us per step of a server",
    "scrape_ms": f"ms per scrape of a gateway with {SESSIONS} sessions",
}


def run() -> Result:
    figures = asyncio.run(_measure())
    return Result(
        name="metrics_cost",
        figures=figures,
        columns=("what", "cost"),
        rows=[(COST_NAMES[name], f"{value:.2f}") for name, value in figures.items()],
        shape="one model, one server, counters and histograms as in production",
        threads=1,
        bars=[Bar("token_us", "<=", 5.0), Bar("scrape_ms", "<=", 25.0)],
    )


async def _measure() -> dict[str, float]:
    node = make_node()
    metrics = GatewayMetrics(node)
    node.on_link_up("s0/1/x", make_hello("s0", 0, BLOCKS))
    meter = metrics.meter_turn(MODEL, 10, 0.0)
    meter.on_tokens(1, 0.1)
    server = ServerMetrics(MODEL, ModelShape(0, 4, BLOCKS, 8, 16, 10, 64, 256), Compute())
    costs = {
        "token_us": _best_seconds(lambda: meter.on_tokens(1, 0.113), 20_000) * 1e6,
        "turn_us": _best_seconds(lambda: _count_turn(metrics), 2_000) * 1e6,
        "step_us": _best_seconds(lambda: server.observe_step(8, 0.01, False), 20_000) * 1e6,
    }
    for _ in range(SESSIONS):
        node.open_session(MODEL)
    return {
        **costs,
        "scrape_ms": _best_seconds(lambda: generate_latest(metrics.registry), 20) * 1e3,
    }


def _count_turn(metrics: GatewayMetrics) -> None:
    """Make all metric calls of a turn, except those for its tokens."""
    meter = metrics.meter_turn(MODEL, 10, 0.0)
    meter.on_started(0.1)
    meter.on_ended(TurnOutcome.COMPLETED, PARKED, 1.0)
    metrics.count_turn(MODEL, TurnOutcome.COMPLETED, "stop")
    metrics.count_request(MODEL, 200)


def _best_seconds(call: Callable[[], object], times: int) -> float:
    """Return the seconds per call of the fastest run."""
    runs: list[float] = []
    for _ in range(RUNS):
        began = time.perf_counter()
        for _ in range(times):
            call()
        runs.append((time.perf_counter() - began) / times)
    return min(runs)
