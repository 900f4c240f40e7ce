"""Transformers' own blocks against the fused form, for every family that has both: time of a decode step.

One span with all blocks in this process, greedy, one thread. The generic path is that of a family without a fused form.
The speeds are in the table of docs/models.md.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from support.models.chain import Chain, Stream
from support.models.tiny_models import FUSED, make_model

from bench.harness import Bar, Result
from modelswarm.checkpoint.families.family import BlockPath
from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm_serving.model.transformer.span import TransformerSpan
from modelswarm_serving.model.transformer.startup import SpanOptions, load_span

BLOCKS, BATCHES, ROUNDS, STEPS = 8, (1, 8), 5, 16
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
}


def run() -> Result:
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    rows = []
    for family in FUSED:
        with tempfile.TemporaryDirectory() as name:
            folder = make_model(
                Path(name), family, blocks=BLOCKS, shard_size="10GB", vocab=1024, **SIZES
            )
            ratios = measure(folder)
        for batch, ratio in ratios.items():
            figures[f"{family}_b{batch}"] = ratio
        rows.append((family, *(f"{ratio:.2f}" for ratio in ratios.values())))
    figures["ratio"] = min(figures[f"llama_b{batch}"] for batch in BATCHES)
    return Result(
        name="generic_path",
        figures=figures,
        columns=("family", *(f"generic / fused, {batch} rows" for batch in BATCHES)),
        rows=rows,
        shape="8 blocks of width 1024, 2816 within, float32",
        threads=1,
        bars=[Bar("ratio", ">=", 0.7)],
    )


def measure(folder: Path) -> dict[int, float]:
    """Return speed of the generic path over that of the fused one, by batch."""
    options = SpanOptions(threads=1, pages=8 * 16, max_length=256)
    fused = load_span(folder, 0, BLOCKS, options)
    with generic_path():
        generic = load_span(folder, 0, BLOCKS, options)
    ratios: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for number in range(ROUNDS + 1):
        for batch in BATCHES:
            seconds = {span: time_steps(span, batch) for span in (fused, generic)}
            if number:  # the first round is a warm-up
                ratios[batch].append(seconds[fused] / seconds[generic])
    return {batch: median(found) for batch, found in ratios.items()}


@contextmanager
def generic_path() -> Iterator[None]:
    """Let all families run by transformers' own blocks."""
    before = dict(FAMILIES)
    FAMILIES.update(
        {name: replace(family, path=BlockPath.GENERIC) for name, family in before.items()}
    )
    try:
        yield
    finally:
        FAMILIES.update(before)


def time_steps(span: TransformerSpan, batch: int) -> float:
    """Return the seconds of some decode steps after a prompt of 32 tokens."""
    streams = [Stream([number + 1] * 32) for number in range(batch)]
    chain = Chain([span])
    chain.generate(streams, 1)
    began = time.perf_counter()
    chain.generate(streams, STEPS)
    return time.perf_counter() - began
