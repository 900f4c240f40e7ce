"""One span with all blocks, without a network, against Hugging Face `generate` in a process of its own.

Both sides take the number format that this CPU computes best, one thread, and turns round by round. Batches of equal
prompts; both times include the prefill.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from statistics import median

import torch
from support.models.chain import Chain, Stream

from bench.engine.local_generate import LocalGenerate
from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from modelswarm.process.cpu_features import cpu_kernels, has_fast_bfloat16
from modelswarm_serving.model.transformer.startup import SpanOptions, load_span

SHAPE, PROMPT, NEW = "246m", 32, 64
BATCHES = {1: 1.1, 8: 1.4, 32: 1.1}
"""Bar of the ratio by batch."""
ROUNDS = 5


def run() -> Result:
    torch.set_num_threads(1)
    folder = model_folder(SHAPE)
    dtype = "bfloat16" if has_fast_bfloat16() else "float32"
    figures: dict[str, float] = {}
    rows = []
    with LocalGenerate(folder, dtype=dtype) as local:
        for batch in BATCHES:
            ratios, ours = measure(folder, local, dtype, batch)
            figures[f"ratio_b{batch}"] = median(ratios)
            figures[f"tokens_per_second_b{batch}"] = median(ours)
            over = f"{min(ratios):.2f} .. {max(ratios):.2f}"
            theirs = median(ours) / median(ratios)
            rows.append(
                (
                    str(batch),
                    f"{theirs:.1f}",
                    f"{median(ours):.1f}",
                    f"{median(ratios):.2f}",
                    over,
                )
            )
    return Result(
        name="engine_alone",
        figures=figures,
        columns=("batch", "generate tok/s", "engine tok/s", "ratio", "over rounds"),
        rows=rows,
        shape=f"Llama 246M {dtype}, prompt {PROMPT}, {NEW} new, {cpu_kernels()}",
        threads=1,
        bars=[Bar(f"ratio_b{batch}", ">=", bar) for batch, bar in BATCHES.items()],
    )


def measure(
    folder: Path, local: LocalGenerate, dtype: str, batch: int
) -> tuple[list[float], list[float]]:
    """Return the ratios and our tokens per second, by round."""
    pages = batch * -(-(PROMPT + NEW) // 16)
    options = SpanOptions(
        dtype=dtype, threads=1, pages=pages, max_length=PROMPT + NEW, token_budget=1024
    )
    span = load_span(folder, 0, SHAPES[SHAPE].blocks, options)
    print(f"batch {batch}: {span.compute.layout} weights, {span.compute.numerics}", flush=True)
    rng = random.Random(batch)
    ratios, rates = [], []
    for number in range(ROUNDS + 1):
        seconds = local.time_generate(batch=batch, prompt=PROMPT, new=NEW)
        streams = [
            Stream([rng.randrange(1, SHAPES[SHAPE].vocab) for _ in range(PROMPT)])
            for _ in range(batch)
        ]
        began = time.perf_counter()
        Chain([span]).generate(streams, NEW)
        own = time.perf_counter() - began
        if number:  # the first round is a warm-up
            ratios.append(seconds / own)
            rates.append(batch * NEW / own)
    return ratios, rates
