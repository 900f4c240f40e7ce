"""Prefill of a prompt of 2,000 tokens over two span processes against one: chunks pass the spans like a pipeline.

The time until the first token of one stream through the gateway. Both swarms run at once and take turns; the idle one
costs nothing. Each server has one thread.
"""

from __future__ import annotations

import random
import time
from statistics import median

from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from bench.swarm import StreamClient, bench_swarm

SHAPE, PROMPT, ROUNDS = "246m", 2048, 7


def run() -> Result:
    folder = model_folder(SHAPE)
    rng = random.Random(1)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with (
        bench_swarm(folder, spans=1, max_length=PROMPT + 64, sessions=2) as one,
        bench_swarm(folder, spans=2, max_length=PROMPT + 64, sessions=2) as two,
    ):
        clients = {1: StreamClient(one.grpc), 2: StreamClient(two.grpc)}
        for number in range(ROUNDS + 1):
            prompt = [rng.randrange(1, SHAPES[SHAPE].vocab) for _ in range(PROMPT)]
            for spans, client in clients.items():
                began = time.perf_counter()
                client.run_stream(prompt, 1)
                if number:  # the first round is a warm-up
                    seconds[spans].append(time.perf_counter() - began)
    speedups = [a / b for a, b in zip(seconds[1], seconds[2], strict=True)]
    rows = [
        (str(spans), f"{median(found):.2f}", f"{PROMPT / median(found):.0f}")
        for spans, found in seconds.items()
    ]
    return Result(
        name="prefill_two_spans",
        figures={"speedup": median(speedups), "seconds_1": median(seconds[1])},
        columns=("server processes", "seconds to the first token", "tokens/s"),
        rows=[*rows, ("ratio", f"{median(speedups):.2f}", "")],
        shape=f"Llama 246M fp32, prompt {PROMPT}, one stream",
        threads=1,
        bars=[Bar("speedup", ">=", 1.6)],
    )
