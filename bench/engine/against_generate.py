"""Tokens per second of two span processes relative to Hugging Face `generate`. Used by `two_spans_1` and `two_spans_8`.

Both run in turn, round by round, so that noise of the machine affects both. The ratio is the median over rounds of the
ratio within a round. Both times include prefill (prompt 32, 128 new tokens).
"""

from __future__ import annotations

import random
from statistics import median

import torch

from bench.engine.local_generate import LocalGenerate
from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from bench.swarm import StreamClient, bench_swarm, time_streams

PROMPT, NEW = 32, 128
ROUNDS = {"27m": 9, "246m": 5}


def compare_with_generate(name: str, streams: int, bars: dict[str, float]) -> Result:
    """Measure both shapes. `bars` has the least ratio of each."""
    figures: dict[str, float] = {}
    rows = []
    for shape in bars:
        local, swarm = measure(shape, streams)
        ratios = [
            swarm_rate / local_rate for swarm_rate, local_rate in zip(swarm, local, strict=True)
        ]
        figures[f"ratio_{shape}"] = median(ratios)
        figures[f"local_{shape}"] = median(local)
        figures[f"swarm_{shape}"] = median(swarm)
        rows.append(
            (
                shape,
                f"{median(local):.1f}",
                f"{median(swarm):.1f}",
                f"{median(ratios):.3f}",
                f"{min(ratios):.3f} .. {max(ratios):.3f}",
            )
        )
    return Result(
        name=name,
        figures=figures,
        columns=("model", "generate tok/s", "swarm tok/s", "ratio", "over rounds"),
        rows=rows,
        shape=f"Llama 27M and 246M fp32, 2 spans, {streams} stream(s), prompt {PROMPT}, {NEW} new, "
        f"{torch.backends.cpu.get_cpu_capability()}",
        threads=1,
        bars=[Bar(f"ratio_{shape}", ">=", bar) for shape, bar in bars.items()],
    )


def measure(shape: str, streams: int) -> tuple[list[float], list[float]]:
    """Return the tokens per second of (generate, swarm), by round."""
    folder = model_folder(shape)
    rng = random.Random(1)
    vocabulary = SHAPES[shape].vocab
    local_rates, swarm_rates = [], []
    with LocalGenerate(folder) as local, bench_swarm(folder, spans=2) as swarm:
        client = StreamClient(swarm.grpc)
        for number in range(ROUNDS[shape] + 1):
            prompts = [
                [rng.randrange(1, vocabulary) for _ in range(PROMPT)] for _ in range(streams)
            ]
            local_rate = streams * NEW / local.time_generate(batch=streams, prompt=PROMPT, new=NEW)
            swarm_rate = streams * NEW / time_streams(client, prompts, NEW)
            if number:  # the first round is a warm-up
                local_rates.append(local_rate)
                swarm_rates.append(swarm_rate)
    return local_rates, swarm_rates
