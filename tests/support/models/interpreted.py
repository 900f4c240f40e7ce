"""The Triton kernels in Triton's interpreter: random attention calls, and whole spans.

A process of its own (`run_interpreted`), because Triton reads TRITON_INTERPRET when a kernel is defined. It prints one
JSON object per case; tests judge them. The dense attention here shares no code with the product.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.attention.backend import Scoring
from modelswarm_serving.model.attention.kv_cache import KvCache, KvCacheShape
from modelswarm_serving.model.attention.step_layout import StepLayout
from modelswarm_serving.model.base import BatchItem

TESTS = Path(__file__).parents[2]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference from the dense attention in float64; values are drawn from the normal distribution."""
PAGES = 400
PROMPTS = (13, 1, 18)
NEW = 6


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A random attention call: its shapes, and its largest difference from the dense attention."""

    seed: int
    dtype: str
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    page_size: int
    rows: tuple[tuple[int, int], ...]  # first position and count of each sequence
    features: tuple[str, ...]
    difference: float
    limit: float


@dataclass(frozen=True, slots=True)
class SpanCase:
    """Tokens of the same streams by the plain steps and by padded decode steps over the Triton kernels."""

    family: str
    plain: list[list[int]]
    padded: list[list[int]]
    were_padded: bool  # the static rows were used
    compute: tuple[str, bool]  # the backend and the decode graphs, as metrics show them


@dataclass(frozen=True, slots=True)
class FaultCase:
    """The error of a planted fault; empty if it was not noticed."""

    error: str


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """Bytes of a full device after the start of a span with captured decode steps."""

    free: int
    step: int  # of the largest step, which must still fit


def run_interpreted(words: Iterable[str]) -> list[dict[str, Any]]:
    """Run these cases in a process with the interpreter and return what it prints of each."""
    done = subprocess.run(
        [sys.executable, "-m", "support.models.interpreted", *words],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def attend_randomly(seed: int) -> AttentionCase:
    """Attend over random pages with random shapes and features, and compare with the dense attention."""
    from modelswarm_serving.model.attention.triton_attention import TritonBackend

    pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = pick.choice(list(LIMITS))
    kv_heads, group = pick.choice((1, 2, 3)), pick.choice((1, 2, 3, 4, 7))
    key_size = pick.choice((8, 16, 24, 40, 64))
    value_size = pick.choice((key_size, key_size, 16, 24))
    page_size, heads = pick.choice((1, 3, 4, 16)), kv_heads * group
    cache = KvCache(KvCacheShape(1, PAGES, page_size, kv_heads, 1), dtype, torch.device("cpu"))
    slots = len(cache.blocks[0])
    keys = torch.randn(slots, kv_heads, key_size, generator=noise).to(dtype)
    values = torch.randn(slots, kv_heads, value_size, generator=noise).to(dtype)
    layout = StepLayout(random_items(pick, page_size), cache)
    query = torch.randn(layout.rows, heads, key_size, generator=noise).to(dtype)
    scoring = random_scoring(pick, noise, heads, key_size)
    out = TritonBackend(cache).attend_pages(layout, keys, values, query, scoring)
    difference = 0.0
    for start, item in zip(layout.starts, layout.items, strict=True):
        end = item.first + item.count
        where = [item.pages[p // page_size] * page_size + p % page_size for p in range(end)]
        rows = slice(start, start + item.count)
        right = attend_densely(query[rows], keys[where], values[where], item.first, scoring)
        difference = max(difference, float((out[rows].double() - right).abs().max()))
    return AttentionCase(
        seed,
        str(dtype),
        heads,
        kv_heads,
        key_size,
        value_size,
        page_size,
        tuple((item.first, item.count) for item in layout.items),
        tuple(
            name
            for name in ("window", "softcap", "slopes", "sinks")
            if getattr(scoring, name) is not None
        ),
        difference,
        LIMITS[dtype],
    )


def random_items(pick: random.Random, page_size: int) -> list[BatchItem]:
    items = []
    for _ in range(pick.randint(1, 5)):
        first, count = pick.choice((0, 1, 5, 17, 63, 150)), pick.choice((1, 1, 2, 5, 33))
        pages = [pick.randrange(PAGES) for _ in range(-(-(first + count) // page_size))]
        items.append(BatchItem(pages, first, count, (0, 1), None, b"", 0, None))
    return items


def random_scoring(
    pick: random.Random, noise: torch.Generator, heads: int, key_size: int
) -> Scoring:
    return Scoring(
        scaling=key_size**-0.5,
        window=pick.choice((None, None, 1, 4, 20)),
        softcap=pick.choice((None, 5.0)),
        slopes=torch.rand(heads, generator=noise) if pick.random() < 0.3 else None,
        sinks=torch.randn(heads, generator=noise) if pick.random() < 0.3 else None,
    )


def attend_densely(
    query: Tensor, keys: Tensor, values: Tensor, first: int, scoring: Scoring
) -> Tensor:
    """Return the attention of rows [first, ...) over all keys of one sequence, in float64."""
    group = query.shape[1] // keys.shape[1]
    k, v = (part.double().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("thd,nhd->htn", query.double(), k) * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    distance = torch.arange(len(keys)) - torch.arange(first, first + len(query))[:, None]
    if scoring.slopes is not None:
        scores = scores + scoring.slopes.double()[:, None, None] * distance
    hidden = distance > 0
    if scoring.window is not None:
        hidden |= distance <= -scoring.window
    scores = scores.masked_fill(hidden, -math.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(keys)]
    return torch.einsum("htn,nhd->thd", weights, v)


def attend_far() -> AttentionCase:
    """Attend over slots whose offset in elements is above 2^31. Untouched memory of the store takes no room."""
    from modelswarm_serving.model.attention.triton_attention import TritonBackend

    noise = torch.Generator().manual_seed(1)
    page_size, width, count = 16, 1 << 16, 20
    pages = (1 << 31) // (page_size * width) + 2
    tiny = KvCache(KvCacheShape(0, pages, page_size, 1, 16), torch.float16, torch.device("cpu"))
    store = torch.empty(pages * page_size, 2, 1, width // 2, dtype=torch.float16)[..., :16]
    held = [pages - 1, pages - 2]
    where = [held[p // page_size] * page_size + p % page_size for p in range(count)]
    store[where] = torch.randn(count, 2, 1, 16, generator=noise).half()
    layout = StepLayout([BatchItem(held, count - 1, 1, (0, 1), None, b"", 0, None)], tiny)
    query = torch.randn(1, 1, 16, generator=noise).half()
    scoring = Scoring(0.25)
    out = TritonBackend(tiny).attend(layout, store, query, scoring)
    kv = store[where]
    right = attend_densely(query, kv[:, 0], kv[:, 1], count - 1, scoring)
    difference = float((out.double() - right).abs().max())
    rows = ((count - 1, 1),)
    return AttentionCase(
        0, "torch.float16", 1, 1, 16, 16, page_size, rows, (), difference, LIMITS[torch.float16]
    )


def run_span(family: str) -> SpanCase:
    """Generate with plain steps, and again with padded decode steps over the Triton kernels."""
    from support.models.chain import OPTIONS, Stream, load_chain
    from support.models.tiny_models import EOS, VOCAB, make_model

    from modelswarm_serving.model.transformer.span import TransformerSpan

    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in PROMPTS]
    samplings = [Sampling(), Sampling(temperature=0.8, top_k=20, seed=2), Sampling()]
    logs: list[list[list[int]]] = []
    were_padded = False
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), family, blocks=2)
        for options in (OPTIONS, replace(OPTIONS, attention_backend="triton", graph_rows=4)):
            chain = load_chain(Path(folder), (0, 1, 2), options=options, seed=3)
            streams = [Stream(p, s) for p, s in zip(prompts, samplings, strict=True)]
            chain.generate(streams, NEW, chunk=8, eos=EOS)
            logs.append([stream.log for stream in streams])
            graphs = [span._graphs for span in chain.spans if isinstance(span, TransformerSpan)]
            were_padded = all(held is not None and bool(held._rows.any()) for held in graphs)
            compute = chain.spans[0].compute
    plain, padded = logs
    shown = compute.attention, compute.decode_graphs
    return SpanCase(family, plain, padded, were_padded, shown)


def notice_fault() -> FaultCase:
    """Change a weight between the reference and the captured decode steps, and return the self-check's error."""
    from support.models.tiny_models import make_model

    from modelswarm.checkpoint.tensor_names import ModelPart
    from modelswarm.errors import ModelSourceError
    from modelswarm_serving.model.attention.triton_attention import TritonBackend
    from modelswarm_serving.model.transformer.decode_graphs import DecodeGraphs
    from modelswarm_serving.model.transformer.fusion import FusedBlocks
    from modelswarm_serving.model.transformer.generic_blocks import GenericBlocks
    from modelswarm_serving.model.transformer.loading import load_modules
    from modelswarm_serving.model.transformer.self_check import check_decode, run_reference

    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder, cpu = make_model(Path(name), blocks=2), torch.device("cpu")
        loaded = load_modules(folder, ModelPart(0, 2, 2), torch.float32, cpu)
        cache = KvCache(KvCacheShape(2, 8, 4, 2, 16), torch.float32, cpu)
        generic = GenericBlocks(loaded.body, loaded.blocks_name)
        check = run_reference(loaded, generic, cache, folder)
        blocks = FusedBlocks(loaded.body, torch.float32)
        graphs = DecodeGraphs(blocks, cache, TritonBackend(cache), 64, 32, 1)
        check_decode(graphs, check.rows, check.output, cache, folder)
        blocks.weights[-1].matrix()[:, 0] += 1.0
        try:
            check_decode(graphs, check.rows, check.output, cache, folder)
        except ModelSourceError as error:
            return FaultCase(str(error))
    return FaultCase("")


def fill_device() -> MemoryCase:
    """Start a span that may use all of its device; captured steps have a page table for each of 256 positions."""
    from support.models.device_library import DeviceLibrary
    from support.models.tiny_models import make_model

    from modelswarm_serving.model.transformer.startup import SpanOptions, load_span

    library = DeviceLibrary(total=32 << 20)
    options = SpanOptions(
        threads=1,
        page_size=1,
        token_budget=4,
        attention_backend="triton",
        graph_rows=16,
        memory_fraction=1.0,
        device=library.open(),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name), blocks=1, max_position_embeddings=256)
        span = load_span(folder, 0, 1, options)
    gc.collect()  # on a CPU, captured steps are in cycles
    free, _ = library.memory(torch.device("cpu"))
    assert span.shape.total_pages > options.graph_rows
    return MemoryCase(free, library.step)


def main(words: list[str]) -> Iterator[AttentionCase | SpanCase | FaultCase | MemoryCase]:
    """Run the cases: numbers are seeds of random calls; words but `far`, `fault` and `memory` are families."""
    torch.set_num_threads(1)
    for word in words:
        if word == "far":
            yield attend_far()
        elif word == "fault":
            yield notice_fault()
        elif word == "memory":
            yield fill_device()
        elif word.isdecimal():
            yield attend_randomly(int(word))
        else:
            yield run_span(word)


if __name__ == "__main__":
    for case in main(sys.argv[1:]):
        print(json.dumps(asdict(case)), flush=True)
