"""Speed of every family over `generate` of transformers, and of transformers' own blocks over the fused form.

One span with all blocks and the whole model of transformers, both in this process with one thread, in turn. The model
is random, with blocks of width 512.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from support.models.chain import Chain, Stream
from support.models.tiny_models import FUSED, TINY, load_whole, make_model

from bench.engine.local_generate import time_tokens
from bench.harness import Bar, Result
from modelswarm.checkpoint.families.family import BlockPath
from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm_serving.model.transformer.span import TransformerSpan
from modelswarm_serving.model.transformer.startup import SpanOptions, load_span

BLOCKS, BATCHES, ROUNDS, PROMPT, NEW = 8, (1, 8), 5, 32, 32
SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408}
OPT_SIZES: dict[str, Any] = {"word_embed_proj_dim": 512, "ffn_dim": 1408}
COLUMNS = {
    **{f"b{batch}": f"engine / generate, {batch} rows" for batch in BATCHES},
    **{f"generic_b{batch}": f"generic / fused, {batch} rows" for batch in BATCHES},
}


def run() -> Result:
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    rows = []
    for family in TINY:
        with tempfile.TemporaryDirectory() as name:
            sizes = SIZES | (OPT_SIZES if family == "opt" else {})
            folder = Path(name)
            make_model(folder, family, blocks=BLOCKS, shard_size="10GB", **sizes)
            found = measure(folder, family)
        figures |= {f"{family}_{what}": ratio for what, ratio in found.items()}
        cells = [f"{found[what]:.2f}" if what in found else "" for what in COLUMNS]
        rows.append((family, *cells))
        print(*rows[-1], flush=True)
    figures["ratio"] = min(figures[f"llama_generic_b{batch}"] for batch in BATCHES)
    return Result(
        name="generic_path",
        figures=figures,
        columns=("family", *COLUMNS.values()),
        rows=rows,
        shape=f"{BLOCKS} blocks of width 512, float32, prompt {PROMPT}, {NEW} new",
        threads=1,
        bars=[Bar("ratio", ">=", 0.7)],
    )


def measure(folder: Path, family: str) -> dict[str, float]:
    """Return the ratios of speeds by column."""
    options = SpanOptions(threads=1, pages=8 * 8, max_length=128)
    served = load_span(folder, 0, BLOCKS, options)
    whole: Any = load_whole(folder)
    sides: dict[str, Callable[[int], float]] = {
        "engine": lambda batch: time_chain(served, batch),
        "generate": lambda batch: time_generate(whole, batch),
    }
    if family in FUSED:
        with generic_path():
            generic = load_span(folder, 0, BLOCKS, options)
        sides["generic"] = lambda batch: time_chain(generic, batch)
    ratios: dict[str, list[float]] = {}
    for number in range(ROUNDS + 1):
        for batch in BATCHES:
            seconds = {name: side(batch) for name, side in sides.items()}
            if number == 0:  # a warm-up
                continue
            ratios.setdefault(f"b{batch}", []).append(seconds["generate"] / seconds["engine"])
            if "generic" in seconds:
                ratio = seconds["engine"] / seconds["generic"]
                ratios.setdefault(f"generic_b{batch}", []).append(ratio)
    return {what: median(found) for what, found in ratios.items()}


@contextmanager
def generic_path() -> Iterator[None]:
    """Let all families run by transformers' own blocks."""
    before = dict(FAMILIES)
    for name, family in before.items():
        FAMILIES[name] = replace(family, path=BlockPath.GENERIC)
    try:
        yield
    finally:
        FAMILIES.update(before)


def time_chain(span: TransformerSpan, batch: int) -> float:
    streams = [Stream([number + 1] * PROMPT) for number in range(batch)]
    began = time.perf_counter()
    Chain([span]).generate(streams, NEW)
    return time.perf_counter() - began


def time_generate(model: Any, batch: int) -> float:
    ids = torch.arange(1, batch + 1).view(-1, 1).expand(-1, PROMPT).contiguous()
    return time_tokens(model, ids, NEW)
