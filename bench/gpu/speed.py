"""Decode and prefill of one span on the GPU against the roofline of the measured copy and the measured product.

The span has eight blocks of Llama 3.1 8B with random weights in bfloat16. Decode reads all weights and the KV of all
sequences once per step, so its roofline is these bytes over the bandwidth of a copy. The host's part of a step is its
time less the time in which kernels ran.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.gpu.report import Outcome
from bench.models import SHAPES, Shape, model_folder

if TYPE_CHECKING:
    from modelswarm_serving.model.base import BatchItem
    from modelswarm_serving.model.transformer.span import TransformerSpan

SHAPE = "8b-span"
BATCHES = (1, 8, 32, 128)
CONTEXT, STEPS, WARM_UP = 1024, 50, 5
PROMPT, CHUNK = 2048, 512
PAGE = 16
COPY_BYTES, COPIES = 2 << 30, 20
SIDE, PRODUCTS = 8192, 20
"""Side of the square product in bfloat16."""
ELEMENT = 2
"""Bytes of a bfloat16."""


def measure_span() -> Outcome:
    from modelswarm_serving.model.device import TorchDrivers, find_device
    from modelswarm_serving.model.transformer.startup import SpanOptions, load_span

    shape, outcome = SHAPES[SHAPE], Outcome()
    bandwidth, flops = measure_copy(), measure_product()
    outcome.figures |= {"copy_tb_s": bandwidth / 1e12, "product_tflop_s": flops / 1e12}
    outcome.rows.append(
        ("roofline", "copy, read and written", f"{bandwidth / 1e12:.2f} TB/s", "", "")
    )
    outcome.rows.append(("roofline", "product bf16", f"{flops / 1e12:.0f} TFLOP/s", "", ""))
    pages = max(BATCHES) * -(-(CONTEXT + STEPS + WARM_UP) // PAGE)
    options = SpanOptions(
        dtype="bfloat16",
        device=find_device("cuda", TorchDrivers()),
        attention="triton",
        pages=pages,
        page_size=PAGE,
        graph_rows=max(BATCHES),
    )
    variants = {
        "Triton, graphs": options,
        "Triton, eager": replace(options, graph_rows=0),
        "SDPA": replace(options, attention="sdpa"),
    }
    for name, variant in variants.items():
        span = load_span(model_folder(SHAPE), 0, shape.blocks, variant)
        for batch in BATCHES:
            add_decode(outcome, span, name, shape, batch, bandwidth)
        add_prefill(outcome, span, name, shape, flops)
        del span
    return outcome


def add_decode(
    outcome: Outcome, span: TransformerSpan, name: str, shape: Shape, batch: int, bandwidth: float
) -> None:
    items = decode_items(span, batch)
    seconds = time_steps(span, items)
    host = seconds - kernel_seconds(span, items[-1])
    bound = (weight_bytes(shape) + batch * CONTEXT * kv_bytes(shape)) / bandwidth
    outcome.figures[f"{name}, decode {batch}, ms"] = seconds * 1e3
    outcome.figures[f"{name}, decode {batch}, share"] = bound / seconds
    measured = (
        f"{seconds * 1e3:.2f} ms, {batch / seconds:.0f} tokens/s, of it host {host * 1e3:.2f} ms"
    )
    outcome.rows.append(
        (
            f"decode, {name}",
            f"B = {batch}, context {CONTEXT}",
            measured,
            f"{bound * 1e3:.2f} ms",
            f"{bound / seconds:.2f}",
        )
    )


def add_prefill(
    outcome: Outcome, span: TransformerSpan, name: str, shape: Shape, flops: float
) -> None:
    prefill(span, CHUNK)
    began = time.perf_counter()
    prefill(span, PROMPT)
    seconds = time.perf_counter() - began
    products = weight_bytes(shape) // ELEMENT - shape.vocab * shape.hidden
    scores = shape.blocks * shape.hidden * PROMPT  # of all heads, half of the square, twice
    bound = 2 * PROMPT * (products + scores) / flops
    outcome.figures[f"{name}, prefill, tokens/s"] = PROMPT / seconds
    outcome.rows.append(
        (
            f"prefill, {name}",
            f"{PROMPT} tokens in chunks of {CHUNK}",
            f"{seconds * 1e3:.1f} ms, {PROMPT / seconds:.0f} tokens/s",
            f"{bound * 1e3:.1f} ms",
            f"{bound / seconds:.2f}",
        )
    )


def decode_items(span: TransformerSpan, batch: int) -> list[list[BatchItem]]:
    """Return the steps: one row of each sequence, after a context whose KV is zeros."""
    from modelswarm.protocol.messages import Sampling
    from modelswarm_serving.model.base import BatchItem, SampleRequest

    free = list(range(span.shape.total_pages))
    random.Random(1).shuffle(free)
    each = span.shape.total_pages // max(BATCHES)
    pages = [free[number * each : (number + 1) * each] for number in range(batch)]
    blocks = (span.shape.first, span.shape.last)
    return [
        [
            BatchItem(
                held, at, 1, blocks, [7], None, at + 1, SampleRequest(Sampling(), at + 1, (), 0)
            )
            for held in pages
        ]
        for at in range(CONTEXT, CONTEXT + WARM_UP + STEPS)
    ]


def time_steps(span: TransformerSpan, steps: list[list[BatchItem]]) -> float:
    """Return the seconds of a step; each of them waits for its tokens."""
    for items in steps[:WARM_UP]:
        span.step(items)
    began = time.perf_counter()
    for items in steps[WARM_UP:]:
        span.step(items)
    return (time.perf_counter() - began) / STEPS


def kernel_seconds(span: TransformerSpan, items: list[BatchItem]) -> float:
    """Return the seconds in which kernels and copies ran during a step."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(WARM_UP):
            span.step(items)
    microseconds = sum(
        float(event.self_device_time_total)
        for event in recorded.key_averages()
        if event.device_type == DeviceType.CUDA
    )
    return microseconds / 1e6 / WARM_UP


def prefill(span: TransformerSpan, count: int) -> None:
    from modelswarm_serving.model.base import BatchItem

    pages, blocks = range(-(-count // PAGE)), (span.shape.first, span.shape.last)
    for first in range(0, count, CHUNK):
        end = first + CHUNK
        span.step([BatchItem(pages, first, CHUNK, blocks, [7] * CHUNK, None, end, None)])
    synchronize()


def weight_bytes(shape: Shape) -> int:
    """Return the bytes of all weights that a decode step reads: not those of the embedding."""
    kv = shape.kv_heads * shape.hidden // shape.heads
    block = 2 * shape.hidden * (shape.hidden + kv) + 3 * shape.hidden * shape.intermediate
    return ELEMENT * (shape.blocks * block + shape.vocab * shape.hidden)


def kv_bytes(shape: Shape) -> int:
    """Return the bytes of the KV of one position in all blocks."""
    return 2 * ELEMENT * shape.blocks * shape.kv_heads * shape.hidden // shape.heads


def measure_copy() -> float:
    """Return the bytes per second of a copy within the device, read and written."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES * COPIES / timed(lambda: target.copy_(source), COPIES)


def measure_product() -> float:
    """Return the operations per second of a large product in bfloat16."""
    import torch

    a, b = (torch.randn(SIDE, SIDE, device="cuda").bfloat16() for _ in range(2))
    return 2 * SIDE**3 * PRODUCTS / timed(lambda: torch.mm(a, b), PRODUCTS)


def timed(call: Callable[[], object], count: int) -> float:
    """Return the seconds of `count` calls, after three more."""
    for _ in range(3):
        call()
    synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    import torch

    torch.cuda.synchronize()
