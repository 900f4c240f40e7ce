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

from bench.gpu.report import Table
from bench.models import SHAPES, Shape, model_folder

if TYPE_CHECKING:
    from modelswarm_serving.model.base import BatchItem, Model
    from modelswarm_serving.model.transformer.span import TransformerSpan
    from modelswarm_serving.model.transformer.startup import SpanOptions

SHAPE = SHAPES["8b-8-blocks"]
BATCHES = (1, 8, 32, 128)
CONTEXT, STEPS, WARM_UP = 1024, 50, 5
PROMPT, CHUNK = 2048, 512
PAGE = 16
COPY_BYTES, COPIES = 2 << 30, 20
SIDE, PRODUCTS = 8192, 20
"""Side of the square product in bfloat16."""
ELEMENT = 2
"""Bytes of a bfloat16."""
NOT_CAPTURED = "decode steps are not captured; the warning at the start has the reason"


def measure_decode(table: Table) -> None:
    """Measure decode steps by captured Triton, by eager Triton and over gathered pages."""
    bandwidth = measure_copy()
    table.figures["copy_tb_s"] = bandwidth / 1e12
    table.add("roofline", "copy, read and written", f"{bandwidth / 1e12:.2f} TB/s", "", "")
    options = span_options()
    variants = {
        "Triton, graphs": options,
        "Triton, eager": replace(options, enforce_eager=True),
        "SDPA": replace(options, attention_backend="sdpa"),
    }
    for name, variant in variants.items():
        with table.case(f"decode, {name}", "loading"):
            span = open_span(variant)
            for batch in BATCHES:
                with table.case(f"decode, {name}", f"B = {batch}, context {CONTEXT}"):
                    add_decode(table, span, name, batch, bandwidth)
            del span  # its memory is needed for the next one


def measure_prefill(table: Table) -> None:
    """Measure prefill by Triton and over gathered pages; its steps are never captured."""
    flops = measure_product()
    table.figures["product_tflop_s"] = flops / 1e12
    table.add("roofline", "product bf16", f"{flops / 1e12:.0f} TFLOP/s", "", "")
    options = span_options()
    variants = {
        "Triton": replace(options, enforce_eager=True),
        "SDPA": replace(options, attention_backend="sdpa"),
    }
    for name, variant in variants.items():
        with table.case(f"prefill, {name}", f"{PROMPT} tokens in chunks of {CHUNK}"):
            add_prefill(table, open_span(variant), name, flops)


def span_options() -> SpanOptions:
    """Return the options of a span with captured steps and KV of the largest batch."""
    from modelswarm_serving.model.device import TorchDrivers, find_device
    from modelswarm_serving.model.transformer.startup import SpanOptions

    return SpanOptions(
        dtype="bfloat16",
        device=find_device("cuda", TorchDrivers()),
        attention_backend="triton",
        pages=max(BATCHES) * -(-(CONTEXT + STEPS + WARM_UP) // PAGE),
        page_size=PAGE,
        graph_rows=max(BATCHES),
    )


def open_span(options: SpanOptions) -> TransformerSpan:
    from modelswarm_serving.model.transformer.startup import load_span

    span = load_span(model_folder(SHAPE.name), 0, SHAPE.blocks, options)
    if lacks_graphs(span, options):
        raise RuntimeError(NOT_CAPTURED)
    return span


def lacks_graphs(span: Model, options: SpanOptions) -> bool:
    """Return True if decode steps of a fused span run eagerly that should be captured: a start only logs the fault."""
    is_wanted = options.attention_backend == "triton" and not options.enforce_eager
    return is_wanted and not span.compute.decode_graphs


def add_decode(
    table: Table, span: TransformerSpan, name: str, batch: int, bandwidth: float
) -> None:
    part, case = f"decode, {name}", f"B = {batch}, context {CONTEXT}"
    items = decode_items(span, batch)
    seconds = time_steps(span, items)
    measured = f"{seconds * 1e3:.2f} ms, {batch / seconds:.0f} tokens/s"
    with table.case(part, f"{case}, host"):  # a profiler that fails costs only the host's part
        host = seconds - kernel_seconds(span, items[-1])
        measured += f", of it host {host * 1e3:.2f} ms"
    bound = (weight_bytes(SHAPE) + batch * CONTEXT * kv_bytes(SHAPE)) / bandwidth
    table.figures[f"{name}, decode {batch}, ms"] = seconds * 1e3
    table.figures[f"{name}, decode {batch}, share"] = bound / seconds
    table.add(part, case, measured, f"{bound * 1e3:.2f} ms", f"{bound / seconds:.2f}")


def add_prefill(table: Table, span: TransformerSpan, name: str, flops: float) -> None:
    prefill(span, CHUNK)
    began = time.perf_counter()
    prefill(span, PROMPT)
    seconds = time.perf_counter() - began
    products = weight_bytes(SHAPE) // ELEMENT - SHAPE.vocab * SHAPE.hidden
    scores = SHAPE.blocks * SHAPE.hidden * PROMPT  # of all heads, half of the square, twice
    bound = 2 * PROMPT * (products + scores) / flops
    table.figures[f"{name}, prefill, tokens/s"] = PROMPT / seconds
    table.add(
        f"prefill, {name}",
        f"{PROMPT} tokens in chunks of {CHUNK}",
        f"{seconds * 1e3:.1f} ms, {PROMPT / seconds:.0f} tokens/s",
        f"{bound * 1e3:.1f} ms",
        f"{bound / seconds:.2f}",
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
