"""Server processes that share one GPU: the cost of a hop, and recovery after a kill."""

from __future__ import annotations

import random

from bench.gpu.report import Outcome
from bench.models import SHAPES, model_folder
from bench.recovery.gap_after_kill import stream_with_kill, wait_replaced
from bench.recovery.gaps import GapStatistics
from bench.speed.hop import measure_token_ms
from bench.swarm import StreamClient, bench_swarm
from modelswarm.client.swarm import SwarmClient

FLAGS = ("--device", "cuda")
KILLS, PROMPT, NEW = 20, 1000, 60


def measure_hop() -> Outcome:
    """Measure the time between two tokens over one and over two processes on the same GPU."""
    one, two = (measure_token_ms(spans, FLAGS) for spans in (1, 2))
    measured = f"{one:.2f} ms per token with one process, {two:.2f} with two"
    row = ("hop", "Llama 1M, one stream", measured, "", f"{two - one:.2f} ms per hop")
    return Outcome([row], {"hop_ms": two - one})


def measure_kills() -> Outcome:
    """Kill servers on the route, 2 spans x 2 servers on one GPU, and compare with the stream without a kill."""
    gaps, rng, victim = GapStatistics(), random.Random(7), None
    folder = model_folder("27m")
    with bench_swarm(folder, spans=2, replicas=2, max_length=1200, server_flags=FLAGS) as swarm:
        client, view = StreamClient(swarm.grpc), SwarmClient(swarm.admin)
        for number in range(KILLS):
            prompt = [rng.randrange(1, SHAPES["27m"].vocab) for _ in range(PROMPT)]
            undisturbed = client.run_stream(prompt, NEW)
            if victim is not None:
                wait_replaced(swarm, victim)
            disturbed, seconds, victim = stream_with_kill(swarm, client, view, prompt, number % 2)
            gaps.add(undisturbed, disturbed, seconds)
    result = gaps.result("gpu", "kills", "", ())
    measured = ", ".join(
        f"{column} {value}" for column, value in zip(result.columns, result.rows[0], strict=True)
    )
    figures = {f"kill_{name}": value for name, value in result.figures.items()}
    return Outcome([("kill", "Llama 27M, 2 spans x 2 servers", measured, "", "")], figures)
